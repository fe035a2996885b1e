"""POST /v1/runs/batch: starts up to 1,000 runs of one template in one transaction, all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from uuid import UUID

import structlog
from fastapi import APIRouter, Request, Response

from leasehold.api.http.callback_urls import REFUSED_URL, check_callback_url
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import REFUSED_FOR_NOW, TOO_MANY_CHECKS, problems
from leasehold.api.http.quick import QuickRoute
from leasehold.api.http.responses import json_response, publish_and_admit
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.creating import Writer, retry_duplicates, seconds_or_none
from leasehold.api.runs.schemas import BatchAccepted, BatchRequest
from leasehold.broker.base import BANDS
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Invalid, RequestError, TooMany
from leasehold.evaluation.evaluator import PayloadMismatch
from leasehold.limits.admission import queues_of_jobs
from leasehold.runtime.pacing import paced
from leasehold.transitions import runs
from leasehold.transitions.runs import CreatedRuns, NewRun

log = structlog.get_logger(__name__)
router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=QuickRoute)


@router.post(
    "/batch",
    operation_id="createRuns",
    summary="Start up to 1,000 runs of a template",
    description="All runs are started, or none. Runs times steps: at most LEASEHOLD_BATCH_MAX_TASKS (5,000). The "
    "error of a payload that does not fit names its position. Each new run counts as a submission; a run that "
    "already exists (`dedupe`) does not.",
    status_code=202,
    response_model=BatchAccepted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`template_disabled`, `same_key_running`, `idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_large`, `payload_too_complex`, "
        f"`nothing_to_do`, `two_workflows`, `invalid_request`, `batch_not_supported`, `batch_too_large`, {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `bulk_writes_waiting`, {TOO_MANY_CHECKS}",
    }),
)  # fmt: skip
async def create_runs(
    request: Request, body: BatchRequest, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    check_callback_url(services.settings, body.callback_url)
    # If `work` has written runs, this list has one pair: the number of these runs, and what must be done after the
    # commit (publish their hints, and admit runs at their concurrency limits). Otherwise the list is empty.
    written_runs: list[tuple[int, CreatedRuns]] = []
    limit_headers: dict[str, str] = {}
    # Refuse a request over a limit before the expensive check of its payloads. Exception: a request that creates no run
    # is not refused. The argument `{}` (the queues) is empty, because the queues are not known yet. So this call does
    # not check the depth of a queue.
    try:
        await refuse_early(services, caller, {}, idempotency_key)
    except TooMany:
        if not await _creates_nothing(services, caller, body):  # this query runs only after a refusal
            raise
    new_runs = await _check_runs(services, caller, body, identity_of(request).trace)

    async def work(connection: Connection) -> Answer:
        if isinstance(new_runs, RequestError):  # `_check_runs` says why the error is raised only here
            raise new_runs
        template_version = new_runs[0].template_version
        existing_ids, runs_to_write = await _split_by_existing(connection, new_runs)
        if runs_to_write:
            params = [run.params for run in runs_to_write]
            queues = queues_of_jobs(caller.tenant_id, template_version.pipeline, params)
            async with services.admission.submitting(connection, caller.payer, queues, len(runs_to_write)) as charge:
                effects = await runs.create_together(connection, runs_to_write)
                written_runs.append((len(runs_to_write), effects))
            limit_headers.update(charge.fields)
        id_of_key = existing_ids | {run.dedupe_key: run.id for run in runs_to_write if run.dedupe_key is not None}
        answer_body = BatchAccepted(
            ids=[run.id if run.dedupe_key is None else id_of_key[run.dedupe_key] for run in new_runs],
            existing=list(existing_ids.values()),
            template=template_version.template.type,
            version=template_version.template.version,
        )
        return Answer(HTTPStatus.ACCEPTED, answer_body.model_dump_json().encode())

    raw_body = await request.body() if idempotency_key else b""
    request_hash = fingerprint(b"POST /v1/runs/batch", raw_body)
    async with services.bulk.turn(caller.tenant_id):  # waits until the tenant may make another bulk write
        # `once` runs `work` in a transaction, unless the idempotency key has an answer already. If another request has
        # just started a run with one of the dedupe keys, `retry_duplicates` calls `once` again.
        answer = await retry_duplicates(
            lambda: once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
        )
    for count, effects in written_runs:
        await publish_and_admit(services, effects.hints, effects.limits)
        SUBMITTED.labels(body.template).inc(count)
        log.info("runs submitted", runs=count)
    return json_response(answer.body, answer.status_code, limit_headers)


async def _creates_nothing(services: Services, caller: Caller, body: BatchRequest) -> bool:
    """Whether each run of the request has a dedupe key, and an unfinished run has each of these keys already."""
    keys = {item.dedupe.key for item in body.runs if item.dedupe is not None}
    if any(item.dedupe is None for item in body.runs):
        return False
    async with services.pool.acquire() as connection:
        return (await runs.unfinished_by_key(connection, caller.tenant_id, body.template, keys)).keys() == keys


async def _split_by_existing(
    connection: Connection, new_runs: Sequence[NewRun]
) -> tuple[dict[str, UUID], list[NewRun]]:
    """Look up the dedupe keys. Returns the ids of the unfinished runs that already have one of the keys (key -> id),
    and the runs among `new_runs` that must be written.

    If several new runs have the same key, only the first of them must be written.
    """
    keys = {run.dedupe_key for run in new_runs if run.dedupe_key is not None}
    if not keys:
        return {}, list(new_runs)
    rows = await runs.unfinished_by_key(
        connection, new_runs[0].tenant_id, new_runs[0].template_version.pipeline.name, keys
    )
    existing_ids = {key: UUID(str(row["id"])) for key, row in rows.items()}
    # A dictionary keeps the last value that is given for a key. Because of `reversed`, that is the first run of the
    # request with this key.
    first_of_key = {run.dedupe_key: run for run in reversed(new_runs) if run.dedupe_key not in existing_ids}
    runs_to_write = [run for run in new_runs if run.dedupe_key is None or first_of_key.get(run.dedupe_key) is run]
    # Sorted by key, so that two batches with the same keys write them in the same order. Otherwise each batch could
    # wait for a key that the other batch has written (a deadlock).
    return existing_ids, sorted(runs_to_write, key=lambda run: run.dedupe_key or "")


async def _check_runs(
    services: Services, caller: Caller, body: BatchRequest, trace: dict[str, str]
) -> list[NewRun] | RequestError:
    """Check the payloads, and build the runs. If the batch is refused, returns the error and does not raise it: the
    caller raises it inside `once`. So a repeated request (with the same idempotency key) gets its first answer, even if
    its payloads no longer fit, because the template has changed.
    """
    try:
        async with services.pool.acquire() as connection:
            template_version = await services.templates.find_usable(
                connection, caller.tenant_id, body.template, body.version
            )
        if not template_version.independent:
            return Invalid(
                "batch_not_supported",
                "Runs of this template that have the same scope exclude each other: start them one by one.",
            )
        max_runs = max(1, services.settings.batch_max_tasks // len(template_version.pipeline.steps))
        if len(body.runs) > max_runs:
            return Invalid("batch_too_large", f"A batch of this template has at most {max_runs} runs.")
        payloads = [item.payload for item in body.runs]
        params = await services.templates.params_of_all(caller.tenant_id, template_version, payloads)
    except PayloadMismatch as error:
        return Invalid(error.code, f"runs[{error.place}]: {error.message}")
    except RequestError as error:
        return error
    return [
        NewRun(
            template_version=template_version,
            tenant_id=caller.tenant_id,
            params=item_params,
            scope=body.scope,
            scope_id=item.scope_id,
            priority=BANDS.index(body.priority),  # BANDS: the priorities, the most urgent first
            scheduled_at=body.scheduled_at,
            trace=trace,
            keep_seconds=services.settings.retention_days * 86_400,
            dedupe_key=None if item.dedupe is None else item.dedupe.key,
            start_within=seconds_or_none(body.start_within_seconds),
            tags=item.tags,
            callback_url=body.callback_url,
        )
        async for item, item_params in paced(list(zip(body.runs, params, strict=True)))
    ]
