"""A run once more: retry a failed run from a step of its own, or start a fresh run of the same payload.

`dead_letters` replays through `retry` and `revive`. A retry is charged as a submission.
"""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import RUNS_WRITE, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import CHECKED_LATER, REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import follow_up_run, json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.creating import accepted_body, accepted_response
from leasehold.api.runs.runs import find_run, invalid_state
from leasehold.api.runs.schemas import ReplayRequest, RunAccepted
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.db.run_reads import Row
from leasehold.domain.errors import Conflict
from leasehold.domain.states import JobState
from leasehold.evaluation.templates import Known
from leasehold.limits.admission import queues_of, queues_waited_in
from leasehold.transitions import runs, webhooks
from leasehold.transitions.runs import CreatedRun, NewRun

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=CallerFirst)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]


@router.post(
    "/{run_id}/retry",
    operation_id="retryRun",
    summary="Retry a failed run, from the step that failed or an earlier step",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: only a failed run can be retried; `same_scope_running`, "
        "`same_key_running`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `unknown_step`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {CHECKED_LATER}",
    }),
)  # fmt: skip
async def retry_run(request: Request, run_id: UUID, caller: Writer, body: ReplayRequest | None = None) -> Response:
    services = services_of(request)
    limit_headers = await retry(services, caller, run_id, body or ReplayRequest())
    return json_response({"id": run_id, "status": JobState.PENDING}, HTTPStatus.ACCEPTED, limit_headers)


async def retry(services: Services, caller: Caller, run_id: UUID, body: ReplayRequest) -> dict[str, str]:
    """Retry the run and return the RateLimit fields. Raises the problems of `retry_run`."""
    run = await find_run(services, caller, run_id)
    if body.payload is not None:
        await refuse_early(services, caller, {})
    async with services.pool.acquire() as connection:
        known = await services.templates.of_run(connection, caller.tenant_id, run["template"], run["version"])
    params = None
    if body.payload is not None:
        params = await services.templates.params(caller.tenant_id, known, body.payload)
    async with (
        services.pool.acquire() as connection,
        connection.transaction(),
        services.admission.submitting(connection, caller.payer, {}) as paid,
    ):
        effects = await revive(services, connection, caller, known, run, params, body.from_step)
        if effects is None:
            raise invalid_state(run["status"])
        paid.queues |= await queues_waited_in(connection, run_id)
    await follow_up_run(services, effects)
    return paid.fields


async def revive(
    services: Services,
    connection: Connection,
    caller: Caller,
    known: Known,
    run: Row,
    params: dict[str, Any] | None = None,
    from_step: str | None = None,
) -> CreatedRun | None:
    """Make the failed `run` pending again, inside the caller's transaction. None: the run is not failed any more.

    Webhook deliveries about the failure that are not written yet are written first: afterwards the run's row no longer
    says how it ended. Raises as `runs.revive`.
    """
    new = NewRun(
        known=known,
        tenant_id=caller.tenant_id,
        params=run["payload"] if params is None else params,
        scope=run["scope"],
        scope_id=run["scope_id"],
        priority=run["priority"],
        id=run["id"],
    )
    deliveries = services.templates.pipelines.find("webhook")
    keep_seconds = services.settings.retention_days * 86_400
    hints = [] if deliveries is None else await webhooks.dispatch(connection, deliveries, keep_seconds, run_id=new.id)
    effects = await runs.revive(connection, new, params, from_step)
    return None if effects is None else replace(effects, hints=[*hints, *effects.hints])


@router.post(
    "/{run_id}/rerun",
    operation_id="rerunRun",
    summary="Start a fresh run of the same payload",
    status_code=202,
    response_model=RunAccepted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`, `template_not_found`",
        HTTPStatus.CONFLICT: "`not_repeatable`, `template_disabled`, `same_scope_running`",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }),
)  # fmt: skip
async def rerun_run(request: Request, run_id: UUID, caller: Writer, idempotency_key: IdempotencyKey = None) -> Response:
    services = services_of(request)
    run = await find_run(services, caller, run_id)
    created: list[CreatedRun] = []
    limit_headers: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        known = await services.templates.find_usable(connection, caller.tenant_id, run["template"], run["version"])
        if not known.template.repeatable:
            raise Conflict("not_repeatable", "The template does not allow its runs to be repeated.")
        new = NewRun(
            known=known,
            tenant_id=caller.tenant_id,
            params=run["payload"],
            scope=run["scope"],
            scope_id=run["scope_id"],
            priority=run["priority"],
            rerun_of=run_id,
            trace=identity_of(request).trace,
            keep_seconds=services.settings.retention_days * 86_400,
        )
        queues = queues_of(caller.tenant_id, known.pipeline)
        async with services.admission.submitting(connection, caller.payer, queues) as paid:
            created.append(await runs.create(connection, new))
        limit_headers.update(paid.fields)
        return Answer(HTTPStatus.ACCEPTED, accepted_body(new))

    request_hash = fingerprint(b"POST /v1/runs/rerun", str(run_id).encode())
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    for effects in created:
        await follow_up_run(services, effects)
    return accepted_response(answer, limit_headers)
