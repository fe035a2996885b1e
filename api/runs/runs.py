"""/v1/runs: list, read, cancel and explain runs. Other modules of this folder start, replay and stream them."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_at
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import encoded, follow_up, json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.explain import explanation
from leasehold.api.runs.schemas import Reason, RunList, run_answer, run_summary
from leasehold.db import run_reads
from leasehold.db.run_reads import Row
from leasehold.domain.errors import Conflict, NotFound
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.exporter.jobs import jobs_ended
from leasehold.transitions import gates, jobs

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=CallerFirst)
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]


@router.get(
    "",
    operation_id="listRuns",
    summary="List runs, newest first",
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
    next_cursor = cursor_of(rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"runs": [run_summary(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.get(
    "/{run_id}",
    operation_id="getRun",
    summary="Get a run, with its steps and its progress",
    responses=problems({HTTPStatus.NOT_FOUND: "`run_not_found`"})
    | {304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}},
)
async def get_run(
    request: Request,
    run_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: Annotated[float, Query(ge=0, le=30, allow_inf_nan=False)] = 0,
) -> Response:
    services = services_of(request)
    run = await find_run(services, caller, run_id)
    if wait and run["finished_at"] is None:
        await services.watch.changed(run_id, run["event_seq"], wait)
        run = await find_run(services, caller, run_id)
    body = encoded(run_answer(run))
    headers = {"ETag": f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'}
    if run["status"] not in JOB_TERMINAL:
        headers["Retry-After"] = "1"
    if if_none_match is not None and headers["ETag"].removeprefix("W/") in if_none_match:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return json_response(body, headers=headers)


async def find_run(services: Services, caller: Caller, run_id: UUID) -> Row:
    """Read the run. Raises NotFound `run_not_found`, also for another tenant's run."""
    async with services.pool.acquire() as connection:
        row = await run_reads.find_run(connection, caller.tenant_id, run_id)
    if row is None:
        raise NotFound("run_not_found", "There is no such run.")
    structlog.contextvars.bind_contextvars(job_id=str(run_id))
    return row


@router.post(
    "/{run_id}/cancel",
    operation_id="cancelRun",
    summary="Ask a run to stop",
    description="A run that has not started ends at once. A running step is asked to stop within a second, and is "
    "stopped after the template's grace. Asking again while the run stops changes nothing.",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: the run has ended; `cancel_not_supported`",
    }),
)  # fmt: skip
async def cancel_run(request: Request, run_id: UUID, caller: Writer, body: Reason | None = None) -> Response:
    services = services_of(request)
    reason = body.reason if body is not None else ""
    await find_run(services, caller, run_id)  # a job of another kind (media, conversion) is no run: 404
    async with services.pool.acquire() as connection:
        limit_names = await gates.gates_of(connection, [run_id])
        cancels = await jobs.request_cancel(
            connection, [run_id], caller.tenant_id, reason=reason, by=f"client {caller.client_id}"
        )
    jobs_ended(cancels.ended)
    status = cancels.states.get(run_id)
    if status is None:
        return _unchanged(run_id, JobState((await find_run(services, caller, run_id))["status"]))
    if status in JOB_TERMINAL:
        await follow_up(services, [], limit_names, [run_id])
    return json_response({"id": run_id, "status": status}, HTTPStatus.ACCEPTED)


def _unchanged(run_id: UUID, status: JobState) -> Response:
    """Answer a request to cancel that changed nothing: the run stops already. Raises Conflict if it cannot be
    stopped.
    """
    if status in JOB_TERMINAL:
        raise invalid_state(status)
    if status is not JobState.CANCEL_REQUESTED:
        raise Conflict("cancel_not_supported", "The template of this run does not support cancelling.")
    return json_response({"id": run_id, "status": status}, HTTPStatus.ACCEPTED)


def invalid_state(status: JobState | str) -> Conflict:
    return Conflict("resource_invalid_state", f"The run is {status}: its state does not allow this.")


@router.get(
    "/{run_id}/explain",
    operation_id="explainRun",
    summary="Explain why a run is not running, and list what its workers did",
    responses=problems({HTTPStatus.NOT_FOUND: "`run_not_found`"}),
)
async def explain_run(request: Request, run_id: UUID, caller: Reader) -> Response:
    services = services_of(request)
    run = await find_run(services, caller, run_id)
    async with services.pool.acquire() as connection:
        waiting_steps = await run_reads.why_waiting(connection, caller.tenant_id, run_id)
        full_limits = await run_reads.why_held(connection, caller.tenant_id, run_id)
        ledger = await run_reads.ledger(connection, caller.tenant_id, run_id)
    return json_response(explanation(run, waiting_steps, full_limits, ledger))
