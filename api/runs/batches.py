"""The runs door for many at once: runs of one template in one transaction, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from uuid import UUID

import structlog
from fastapi import APIRouter, Request, Response

from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import CHECKED_LATER, REFUSED_FOR_NOW, problems
from leasehold.api.http.quick import QuickRoute
from leasehold.api.http.responses import json_response, tell
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.runs import Writer, past_duplicates, seconds_or_none
from leasehold.api.runs.schemas import BatchAccepted, BatchRequest
from leasehold.broker.base import BANDS
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Invalid, RequestError
from leasehold.evaluation.evaluator import Misfit
from leasehold.limits.admission import queues_of
from leasehold.runtime.pacing import paced
from leasehold.transitions import runs
from leasehold.transitions.runs import MadeTogether, NewRun

log = structlog.get_logger(__name__)
router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=QuickRoute)


@router.post(
    "/batch",
    operation_id="createRuns",
    summary="Start up to 1,000 runs of a template",
    description="All of them or none, and at most LEASEHOLD_BATCH_MAX_TASKS (5,000) runs times steps; a payload that "
    "does not fit is named by its place. Each counts as a submission, but those that are there already (`dedupe`).",
    status_code=202,
    response_model=BatchAccepted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`template_disabled`, `same_key_running`, `idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_large`, `payload_too_complex`, "
        "`nothing_to_do`, `invalid_request`, `batch_not_supported`, `batch_too_large`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`, {CHECKED_LATER}",
    }),
)  # fmt: skip
async def create_runs(
    request: Request, wanted: BatchRequest, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    made: list[tuple[int, MadeTogether]] = []
    limited: dict[str, str] = {}
    await refuse_early(services, caller, {}, idempotency_key)
    new = await _prepared(services, caller, wanted, identity_of(request).trace)

    async def work(connection: Connection) -> Answer:
        if isinstance(new, RequestError):
            raise new
        known = new[0].known
        there, fresh = await _sorted_out(connection, new)
        if fresh:
            queues = queues_of(caller.tenant_id, known.pipeline)
            async with services.admission.submitting(connection, caller.payer, queues, len(fresh)) as paid:
                made.append((len(fresh), await runs.create_together(connection, fresh)))
            limited.update(paid.fields)
        ids = there | {one.dedupe_key: one.id for one in fresh if one.dedupe_key is not None}
        said = BatchAccepted(
            ids=[one.id if one.dedupe_key is None else ids[one.dedupe_key] for one in new],
            existing=list(there.values()),
            template=known.template.type,
            version=known.template.version,
        )
        return Answer(HTTPStatus.ACCEPTED, said.model_dump_json().encode())

    body = await request.body() if idempotency_key else b""
    asked = fingerprint(b"POST /v1/runs/batch", body)
    async with services.bulk.turn(caller.tenant_id):
        answer = await past_duplicates(lambda: once(services.pool, caller.tenant_id, idempotency_key, asked, work))
    for number, batch in made:
        await tell(services, batch.hints, batch.gates)
        SUBMITTED.labels(wanted.template).inc(number)
        log.info("runs submitted", runs=number)
    return json_response(answer.body, answer.status_code, limited)


async def _sorted_out(connection: Connection, new: Sequence[NewRun]) -> tuple[dict[str, UUID], list[NewRun]]:
    """The runs that are there already, by their dedupe keys; and those that are to be made, the first of each key."""
    keys = {one.dedupe_key for one in new if one.dedupe_key is not None}
    if not keys:
        return {}, list(new)
    found = await runs.living(connection, new[0].tenant_id, new[0].known.pipeline.name, keys)
    there = {key: UUID(str(row["id"])) for key, row in found.items()}
    firsts = {one.dedupe_key: one for one in reversed(new) if one.dedupe_key not in there}
    fresh = [one for one in new if one.dedupe_key is None or firsts.get(one.dedupe_key) is one]
    # Batches that have keys in common wait for each other in one order.
    return there, sorted(fresh, key=lambda one: one.dedupe_key or "")


async def _prepared(
    services: Services, caller: Caller, wanted: BatchRequest, trace: dict[str, str]
) -> list[NewRun] | RequestError:
    """The runs, or why there are none; as of one run: no connection is held while the payloads are checked."""
    try:
        async with services.pool.acquire() as connection:
            known = await services.templates.find_usable(connection, caller.tenant_id, wanted.template, wanted.version)
        if not known.independent:
            said = "Runs of this template stand in each other's way: start them one by one."
            return Invalid("batch_not_supported", said)
        most = services.settings.batch_max_tasks // len(known.pipeline.steps)
        if len(wanted.runs) > max(1, most):
            return Invalid(
                "batch_too_large", f"Of this template, with its steps, a batch has at most {max(1, most)} runs."
            )
        payloads = [item.payload for item in wanted.runs]
        params = await services.templates.params_of_all(caller.tenant_id, known, payloads)
    except Misfit as error:
        return Invalid(error.code, f"runs[{error.place}]: {error.message}")
    except RequestError as error:
        return error
    return [
        NewRun(
            known=known,
            tenant_id=caller.tenant_id,
            params=checked,
            scope=wanted.scope,
            scope_id=item.scope_id,
            priority=BANDS.index(wanted.priority),
            scheduled_at=wanted.scheduled_at,
            trace=trace,
            keep_seconds=services.settings.retention_days * 86_400,
            dedupe_key=None if item.dedupe is None else item.dedupe.key,
            start_within=seconds_or_none(wanted.start_within_seconds),
        )
        async for item, checked in paced(list(zip(wanted.runs, params, strict=True)))
    ]
