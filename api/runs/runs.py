"""The runs door: make, see, cancel, retry and rerun runs of any template."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

import orjson
import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_at
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import CHECKED_LATER, REFUSED_FOR_NOW, problems
from leasehold.api.http.quick import QuickRoute
from leasehold.api.http.responses import encoded, json_response, tell, tell_of
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.explain import explanation
from leasehold.api.runs.schemas import Reason, ReplayRequest, RunAccepted, RunList, RunRequest, run_answer, run_summary
from leasehold.broker.base import BANDS
from leasehold.db import run_reads
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.db.run_reads import Row
from leasehold.domain.errors import Conflict, NotFound, RequestError
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.evaluation.templates import Known
from leasehold.exporter.jobs import jobs_ended
from leasehold.limits.admission import queues_of, queues_waited_in
from leasehold.transitions import gates, jobs, runs, webhooks
from leasehold.transitions.runs import Duplicate, Made, NewRun

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=CallerFirst)
quick = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=QuickRoute)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]
_THERE: dict[int | str, dict[str, Any]] = {
    200: {"model": RunAccepted, "description": "An unfinished run has the `dedupe` key: this one."}
}
#: Of whoever meets others that start and end runs with the same dedupe key.
_TRIES = 5


@quick.post(
    "",
    operation_id="createRun",
    summary="Start a run of a template",
    description="With `dedupe`, 200 and the run that is there already while one with that key is unfinished.",
    status_code=202,
    response_model=RunAccepted,
    responses=_THERE
    | problems({
        HTTPStatus.NOT_FOUND: "`template_not_found`",
        HTTPStatus.CONFLICT: "`template_disabled`, `same_scope_running`, `same_key_running`, "
        "`idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_large`, `payload_too_complex`, "
        "`nothing_to_do`, `invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {CHECKED_LATER}",
    }),
)  # fmt: skip
async def create_run(
    request: Request, wanted: RunRequest, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    there = None if wanted.dedupe is None or idempotency_key else await _looked_up(services, caller, wanted)
    if there is not None:
        return _made_response(there, {})
    is_open = await services.admission.is_open(services.pool, caller.tenant_id)
    if not is_open:
        await refuse_early(services, caller, {}, idempotency_key)
    new = await _prepared(services, caller, wanted, identity_of(request).trace)
    if idempotency_key is None and is_open:
        if isinstance(new, RequestError):
            raise new
        if new.dedupe_key is None and new.known.independent and await services.submissions.create(new):
            _note(new)
            return _made_response(Answer(HTTPStatus.ACCEPTED, _accepted(new)), {})
    made: list[tuple[NewRun, Made]] = []
    limited: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        if isinstance(new, RequestError):
            raise new
        if (there := await _existing(connection, caller.tenant_id, wanted)) is not None:
            return there
        queues = queues_of(caller.tenant_id, new.known.pipeline)
        async with services.admission.submitting(connection, caller.payer, queues) as paid:
            made.append((new, await runs.create(connection, new)))
        limited.update(paid.fields)
        return Answer(HTTPStatus.ACCEPTED, _accepted(new))

    asked = fingerprint(b"POST /v1/runs", wanted.model_dump_json().encode())
    answer = await past_duplicates(lambda: once(services.pool, caller.tenant_id, idempotency_key, asked, work))
    for fresh, one in made:
        await tell_of(services, one)
        _note(fresh)
    return _made_response(answer, limited)


async def past_duplicates(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """The answer of `ask`, asked again where others start runs with the same dedupe keys meanwhile: theirs are found
    then, or have ended. Raises Duplicate for who never comes through, and whatever else `ask` raises.
    """
    for _ in range(_TRIES - 1):
        with suppress(Duplicate):
            return await ask()
    return await ask()


async def _looked_up(services: Services, caller: Caller, wanted: RunRequest) -> Answer | None:
    """As `_existing`, before anything is checked or charged."""
    async with services.pool.acquire() as connection:
        return await _existing(connection, caller.tenant_id, wanted)


async def _existing(connection: Connection, tenant_id: str, wanted: RunRequest) -> Answer | None:
    """With the run that has the dedupe key."""
    if wanted.dedupe is None:
        return None
    found = (await runs.living(connection, tenant_id, wanted.template, [wanted.dedupe.key])).get(wanted.dedupe.key)
    if found is None:
        return None
    said = {"id": found["id"], "status": found["status"], "template": wanted.template, "version": found["version"]}
    return Answer(HTTPStatus.OK, encoded(said))


async def _prepared(
    services: Services, caller: Caller, wanted: RunRequest, trace: dict[str, str]
) -> NewRun | RequestError:
    """The run, or why there is none. A request that repeats an earlier one is told what that one was told, whatever
    has become of the template since, so the error is only raised where the request is the first.

    The payload is checked while no connection is held: a tenant's payloads may have to wait for each other.
    """
    try:
        known = await _known(services, caller, wanted)
        return NewRun(
            known=known,
            tenant_id=caller.tenant_id,
            params=await services.templates.params(caller.tenant_id, known, wanted.payload),
            scope=wanted.scope,
            scope_id=wanted.scope_id,
            priority=BANDS.index(wanted.priority),
            scheduled_at=wanted.scheduled_at,
            trace=trace,
            keep_seconds=services.settings.retention_days * 86_400,
            dedupe_key=None if wanted.dedupe is None else wanted.dedupe.key,
            start_within=seconds_or_none(wanted.start_within_seconds),
        )
    except RequestError as error:
        return error


def seconds_or_none(number: int | None) -> timedelta | None:
    return None if number is None else timedelta(seconds=number)


async def _known(services: Services, caller: Caller, wanted: RunRequest) -> Known:
    """Without the database where nothing has to be looked up."""
    known = services.templates.by_code(wanted.template, wanted.version)
    if known is not None:
        return known
    async with services.pool.acquire() as connection:
        return await services.templates.find_usable(connection, caller.tenant_id, wanted.template, wanted.version)


def _accepted(new: NewRun) -> bytes:
    """A RunAccepted."""
    template = new.known.template
    said = {"id": new.id, "status": JobState.PENDING, "template": template.type, "version": template.version}
    return encoded(said)


def _note(new: NewRun) -> None:
    SUBMITTED.labels(new.known.template.type).inc()
    structlog.contextvars.bind_contextvars(job_id=str(new.id))  # for the request's own line


def _made_response(answer: Answer, limited: dict[str, str]) -> Response:
    """Of an answer that is a RunAccepted."""
    run_id = orjson.loads(answer.body)["id"]
    return json_response(answer.body, answer.status_code, limited | {"Location": f"/v1/runs/{run_id}"})


@router.get(
    "",
    operation_id="listRuns",
    summary="List runs, the newest first",
    response_model=RunList,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"}),
)
async def list_runs(
    request: Request,
    caller: Reader,
    template: Annotated[str | None, Query(max_length=63)] = None,
    status: JobState | None = None,
    scope: Annotated[str | None, Query(max_length=63)] = None,
    scope_id: Annotated[str, Query(max_length=200)] = "",
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await run_reads.list_runs(
            connection,
            caller.tenant_id,
            template=template,
            scope=None if scope is None else (scope, scope_id),
            status=status,
            before=id_at(cursor),
            limit=limit + 1,
        )
    more = cursor_of(rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"runs": [run_summary(row) for row in rows[:limit]], "next_cursor": more})


@router.get(
    "/{run_id}",
    operation_id="getRun",
    summary="See how a run stands",
    responses=problems({HTTPStatus.NOT_FOUND: "`run_not_found`"}) | {304: {"description": "Nothing changed."}},
)
async def get_run(
    request: Request,
    run_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: Annotated[float, Query(ge=0, le=30, allow_inf_nan=False)] = 0,
) -> Response:
    services = services_of(request)
    found = await find_run(services, caller, run_id)
    if wait and found["finished_at"] is None:
        await services.watch.changed(run_id, found["event_seq"], wait)
        found = await find_run(services, caller, run_id)
    body = encoded(run_answer(found))
    headers = {"ETag": f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'}
    if found["status"] not in JOB_TERMINAL:
        headers["Retry-After"] = "1"
    if if_none_match is not None and headers["ETag"].removeprefix("W/") in if_none_match:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return json_response(body, headers=headers)


async def find_run(services: Services, caller: Caller, run_id: UUID) -> Row:
    """Raises NotFound; another tenant's run is not there."""
    async with services.pool.acquire() as connection:
        found = await run_reads.find_run(connection, caller.tenant_id, run_id)
    if found is None:
        raise NotFound("run_not_found", "There is no such run.")
    structlog.contextvars.bind_contextvars(job_id=str(run_id))
    return found


@router.post(
    "/{run_id}/cancel",
    operation_id="cancelRun",
    summary="Ask a run to stop",
    description="A run that has not started ends at once; a running step is told within a second, and stopped after "
    "the template's grace. Asking again while it stops changes nothing.",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: it has ended; `cancel_not_supported`",
    }),
)  # fmt: skip
async def cancel_run(request: Request, run_id: UUID, caller: Writer, asked: Reason | None = None) -> Response:
    services = services_of(request)
    reason = asked.reason if asked is not None else ""
    await find_run(services, caller, run_id)  # jobs of other kinds are cancelled where they were made, if at all
    async with services.pool.acquire() as connection:
        names = await gates.gates_of(connection, [run_id])
        cancels = await jobs.request_cancel(
            connection, [run_id], caller.tenant_id, reason=reason, by=f"client {caller.client_id}"
        )
    jobs_ended(cancels.ended)
    status = cancels.states.get(run_id)
    if status is None:
        found = await find_run(services, caller, run_id)
        status = JobState(found["status"])
        if status in JOB_TERMINAL:
            raise invalid_state(status)
        if status is not JobState.CANCEL_REQUESTED:
            raise Conflict("cancel_not_supported", "The template of this run does not support cancelling.")
    elif status in JOB_TERMINAL:
        await tell(services, [], names, [run_id])
    return json_response({"id": run_id, "status": status}, HTTPStatus.ACCEPTED)


def invalid_state(status: JobState | str) -> Conflict:
    return Conflict("resource_invalid_state", f"The run is {status}: this cannot be done with it.")


@router.post(
    "/{run_id}/retry",
    operation_id="retryRun",
    summary="Go on with a failed run, from the step that failed or an earlier one",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: only a failed run is retried; `same_scope_running`, "
        "`same_key_running`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `unknown_step`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {CHECKED_LATER}",
    }),
)  # fmt: skip
async def retry_run(request: Request, run_id: UUID, caller: Writer, asked: ReplayRequest | None = None) -> Response:
    services = services_of(request)
    limited = await retry(services, caller, run_id, asked or ReplayRequest())
    return json_response({"id": run_id, "status": JobState.PENDING}, HTTPStatus.ACCEPTED, limited)


async def retry(services: Services, caller: Caller, run_id: UUID, asked: ReplayRequest) -> dict[str, str]:
    """The RateLimit fields: it is a submission as any other. Raises as the door says."""
    found = await find_run(services, caller, run_id)
    if asked.payload is not None:
        await refuse_early(services, caller, {})
    async with services.pool.acquire() as connection:
        known = await services.templates.of_run(connection, caller.tenant_id, found["template"], found["version"])
    params = None
    if asked.payload is not None:
        params = await services.templates.params(caller.tenant_id, known, asked.payload)
    async with (
        services.pool.acquire() as connection,
        connection.transaction(),
        services.admission.submitting(connection, caller.payer, {}) as paid,
    ):
        made = await revived(services, connection, caller, known, found, params, asked.from_step)
        if made is None:
            raise invalid_state(found["status"])
        paid.queues |= await queues_waited_in(connection, run_id)
    await tell_of(services, made)
    return paid.fields


async def revived(
    services: Services,
    connection: Connection,
    caller: Caller,
    known: Known,
    found: Row,
    params: dict[str, Any] | None = None,
    from_step: str | None = None,
) -> Made | None:
    """A second life for the failed run `found`; in a transaction. Webhooks that were not told yet how the first one
    ended are told now. Raises as runs.revive.
    """
    new = NewRun(
        known=known,
        tenant_id=caller.tenant_id,
        params=found["payload"] if params is None else params,
        scope=found["scope"],
        scope_id=found["scope_id"],
        priority=found["priority"],
        id=found["id"],
    )
    deliveries = services.templates.pipelines.find("webhook")
    keep = services.settings.retention_days * 86_400
    told = [] if deliveries is None else await webhooks.dispatch(connection, deliveries, keep, run_id=new.id)
    made = await runs.revive(connection, new, params, from_step)
    return None if made is None else replace(made, hints=[*told, *made.hints])


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
    found = await find_run(services, caller, run_id)
    made: list[Made] = []
    limited: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        known = await services.templates.find_usable(connection, caller.tenant_id, found["template"], found["version"])
        if not known.template.repeatable:
            raise Conflict("not_repeatable", "Runs of this template are not repeated.")
        new = NewRun(
            known=known,
            tenant_id=caller.tenant_id,
            params=found["payload"],
            scope=found["scope"],
            scope_id=found["scope_id"],
            priority=found["priority"],
            rerun_of=run_id,
            trace=identity_of(request).trace,
            keep_seconds=services.settings.retention_days * 86_400,
        )
        queues = queues_of(caller.tenant_id, known.pipeline)
        async with services.admission.submitting(connection, caller.payer, queues) as paid:
            made.append(await runs.create(connection, new))
        limited.update(paid.fields)
        return Answer(HTTPStatus.ACCEPTED, _accepted(new))

    asked = fingerprint(b"POST /v1/runs/rerun", str(run_id).encode())
    answer = await once(services.pool, caller.tenant_id, idempotency_key, asked, work)
    for one in made:
        await tell_of(services, one)
    return _made_response(answer, limited)


@router.get(
    "/{run_id}/explain",
    operation_id="explainRun",
    summary="Why a run stands where it does, and the proof of what it did",
    responses=problems({HTTPStatus.NOT_FOUND: "`run_not_found`"}),
)
async def explain_run(request: Request, run_id: UUID, caller: Reader) -> Response:
    services = services_of(request)
    found = await find_run(services, caller, run_id)
    async with services.pool.acquire() as connection:
        waiting = await run_reads.why_waiting(connection, caller.tenant_id, run_id)
        held = await run_reads.why_held(connection, caller.tenant_id, run_id)
        ledger = await run_reads.ledger(connection, caller.tenant_id, run_id)
    return json_response(explanation(found, waiting, held, ledger))
