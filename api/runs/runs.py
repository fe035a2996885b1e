"""/v1/runs: lists, reads, cancels and explains runs. Other modules of this folder start, repeat and stream runs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from leasehold.api.auth.security import RUNS_READ, RUNS_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.etags import WaitSeconds, matches, may_be_current, weak_etag
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.jobs.access import JobAccess, access_of
from leasehold.api.jobs.ending import cancel
from leasehold.api.jobs.explain import explain
from leasehold.api.jobs.schemas import Reason
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.schemas import RunList, run_answer, run_summary
from leasehold.db import job_reads, run_reads
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Invalid, NotFound
from leasehold.domain.states import JOB_TERMINAL, JobState

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=AuthenticatedFirst)
#: The caller of an endpoint that writes, or that reads. The caller's API key must have this scope.
Writer = Annotated[Caller, Depends(Require(RUNS_WRITE))]
Reader = Annotated[Caller, Depends(Require(RUNS_READ))]


@router.get(
    "",
    operation_id="listRuns",
    summary="List runs, newest first",
    response_model=RunList,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`, `scope_missing`"}),
)
@may_read_standby
async def list_runs(
    request: Request,
    caller: Reader,
    template: Annotated[str | None, Query(max_length=63)] = None,
    status: JobState | None = None,
    scope: Annotated[
        str | None, Query(max_length=63, description="Only runs of this scope and `scope_id`, together.")
    ] = None,
    scope_id: Annotated[
        str | None,
        Query(max_length=200, description="It needs `scope`. If left out: the runs of the scope that have no id."),
    ] = None,
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    if scope is None and scope_id is not None:
        raise Invalid("scope_missing", "`scope_id` is an id in a scope: name the scope, too.")
    async with services_of(request).pool.acquire() as connection:
        rows = await run_reads.list_runs(
            connection,
            caller.tenant_id,
            template=template,
            scope=None if scope is None else (scope, scope_id or ""),
            status=status,
            before=id_of_cursor(cursor),
            limit=limit + 1,
        )
    next_cursor = cursor_of(rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"runs": [run_summary(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.get(
    "/{run_id}",
    operation_id="getRun",
    summary="Get a run, with its steps and its progress",
    description="At most 1,000 steps with their results, and at most 1,000 outputs. Steps that a workflow has started, "
    "and their outputs, come last. `progress.step_count` is the number of all steps. If there are more, "
    "`progress.next_cursor` is the `cursor` of the next page, which has other steps and their results.",
    responses=problems(
        {
            HTTPStatus.NOT_FOUND: "`run_not_found`",
            HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`",
        }
    )
    | {304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}},
)
async def get_run(
    request: Request,
    run_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: WaitSeconds = 0,
    cursor: IdCursor = None,
) -> Response:
    services = services_of(request)
    after_step = id_of_cursor(cursor)
    run = await find_run(services, caller, run_id, after_step)
    body = encoded(run_answer(run))
    # If the client may have this answer already, wait for a change.
    if wait and run["finished_at"] is None and may_be_current(if_none_match, weak_etag(body)):
        await services.watch.changed(run_id, run["event_seq"], wait)
        run = await find_run(services, caller, run_id, after_step)
        body = encoded(run_answer(run))
    headers = {"ETag": weak_etag(body)}
    if run["status"] not in JOB_TERMINAL:
        headers["Retry-After"] = "1"
    if matches(if_none_match, headers["ETag"]):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return json_response(body, headers=headers)


async def find_run(services: Services, caller: Caller, run_id: UUID, after_step: UUID | None = None) -> Row:
    """Read the run with a page of its steps, and its outputs. `after_step`: the id of the last step of the previous
    page, or None for the first page. Raises NotFound `run_not_found`, also for another tenant's run.
    """
    async with services.pool.acquire() as connection:
        row = await run_reads.find_run(connection, caller.tenant_id, run_id, after_step)
    return _existing_row(row, run_id)


async def find_listed_run(services: Services, caller: Caller, run_id: UUID) -> Row:
    """Read the run without its payload, steps and outputs, as lists do. Raises NotFound as `find_run` does."""
    async with services.pool.acquire() as connection:
        row = await run_reads.find_listed_run(connection, caller.tenant_id, run_id)
    return _existing_row(row, run_id)


async def run_access(services: Services, caller: Caller, run_id: UUID) -> JobAccess:
    """The run with its kind, for the functions that act on jobs of all kinds. Raises NotFound `run_not_found`, also for
    a job of another kind (media, conversion).
    """
    async with services.pool.acquire() as connection:
        row = await job_reads.find_job(connection, caller.tenant_id, run_id)
    return access_of(services, caller, _existing_row(row if row is not None and row["is_run"] else None, run_id))


def _existing_row(row: Row | None, run_id: UUID) -> Row:
    """Add the run's id to the log context, and return the row. Raises NotFound if there is no row."""
    if row is None:
        raise NotFound("run_not_found", "There is no such run.")
    structlog.contextvars.bind_contextvars(job_id=str(run_id))
    return row


@router.post(
    "/{run_id}/cancel",
    operation_id="cancelRun",
    summary="Ask a run to stop",
    description="A run that has not started ends immediately. A running step is asked to stop within a second, and is "
    "stopped after the template's grace. Asking again while the run stops changes nothing.",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: the run has ended; `cancel_not_supported`",
    }),
)  # fmt: skip
async def cancel_run(request: Request, run_id: UUID, caller: Writer, body: Reason | None = None) -> Response:
    services = services_of(request)
    status = await cancel(services, await run_access(services, caller, run_id), "" if body is None else body.reason)
    return json_response({"id": run_id, "status": status}, HTTPStatus.ACCEPTED)


@router.get(
    "/{run_id}/explain",
    operation_id="explainRun",
    summary="Explain why a run is not running, and list what its workers did",
    responses=problems({HTTPStatus.NOT_FOUND: "`run_not_found`"}),
)
async def explain_run(request: Request, run_id: UUID, caller: Reader) -> Response:
    services = services_of(request)
    return json_response(await explain(services, caller.tenant_id, await find_listed_run(services, caller, run_id)))
