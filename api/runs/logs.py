"""GET /v1/runs/{run_id}/logs: what a run logs."""

from __future__ import annotations

from http import HTTPStatus
from uuid import UUID

from fastapi import APIRouter, Request, Response

from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.streams import LastEventId
from leasehold.api.jobs import logs
from leasehold.api.jobs.logs import Accept, After, Limit, OfAttempt, OfStep
from leasehold.api.jobs.schemas import LogPage
from leasehold.api.process.services import services_of
from leasehold.api.runs.runs import Reader, find_run

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=CallerFirst)


@router.get(
    "/{run_id}/logs",
    operation_id="readRunLogs",
    summary="Read or follow what a run logs",
    description=logs.DESCRIPTION,
    response_model=LogPage,
    responses=problems({HTTPStatus.NOT_FOUND: "`run_not_found`"} | logs.INVALID) | logs.PAGE_OR_STREAM,
)
async def read_run_logs(
    request: Request,
    run_id: UUID,
    caller: Reader,
    after: After = 0,
    limit: Limit = 100,
    step: OfStep = None,
    attempt: OfAttempt = None,
    last_event_id: LastEventId = None,
    accept: Accept = None,
) -> Response:
    services = services_of(request)
    wanted = logs.wanted_of(after, limit, step, attempt, last_event_id, accept)
    await find_run(services, caller, run_id)
    return await logs.logs_of(services, caller.tenant_id, run_id, wanted)
