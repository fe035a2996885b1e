"""GET /v1/runs/{run_id}/events: streams a run's events as they happen. A client can resume the stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from leasehold.api.auth.security import RUNS_READ, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.streams import ANSWERS, HEADERS, LastEventId, event_number, stream
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.api.runs.runs import find_listed_run
from leasehold.db.event_reads import EventView
from leasehold.domain.states import JOB_TERMINAL

router = APIRouter(tags=["runs"], route_class=AuthenticatedFirst)


@router.get(
    "/v1/runs/{run_id}/events",
    operation_id="streamRunEvents",
    summary="Follow a run",
    description="Server-sent events, one for each change. The stream ends after the last event. A client that "
    "reconnects with `Last-Event-ID` gets each event exactly once. If no event can follow, the answer is 204.",
    response_class=StreamingResponse,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`run_not_found`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`",
    }) | ANSWERS,
)  # fmt: skip
async def stream_run_events(
    request: Request,
    run_id: UUID,
    caller: Annotated[Caller, Depends(Require(RUNS_READ))],
    last_event_id: LastEventId = None,
) -> Response:
    services = services_of(request)
    last_number = event_number(last_event_id)
    run = await find_listed_run(services, caller, run_id)
    if run["status"] in JOB_TERMINAL and run["event_seq"] <= last_number:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return StreamingResponse(
        stream(services, caller.tenant_id, run_id, last_number, _status_fields),
        media_type="text/event-stream",
        headers=HEADERS,
    )


def _status_fields(event: EventView) -> dict[str, Any]:
    return {"status": event.job_status, "step_status": event.task_status}
