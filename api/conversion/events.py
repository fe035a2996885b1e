"""GET /api/v1/jobs/{job_id}/events: streams a conversion's events as they happen. A client can resume the stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from leasehold.api.conversion.conversion import PATH, Reader, find
from leasehold.api.conversion.rates import check_rate
from leasehold.api.conversion.view import PUBLIC_STATE, is_finished
from leasehold.api.http.openapi import problems
from leasehold.api.http.streams import ANSWERS, HEADERS, LastEventId, event_number, stream
from leasehold.api.process.services import services_of
from leasehold.db.event_reads import EventView

router = APIRouter(tags=["conversion"])


@router.get(
    f"{PATH}/{{job_id}}/events",
    operation_id="streamConversionEvents",
    summary="Follow a conversion",
    description="Server-sent events, one for each change. The stream ends after the last event. A client that "
    "reconnects with `Last-Event-ID` gets each event exactly once. If no event can follow, the answer is 204.",
    response_class=StreamingResponse,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`job_not_found`",
        HTTPStatus.GONE: "`expired`",
        HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`, `invalid_request`",
    }) | ANSWERS,
)  # fmt: skip
async def stream_conversion_events(
    request: Request,
    job_id: UUID,
    caller: Reader,
    last_event_id: LastEventId = None,
) -> Response:
    services = services_of(request)
    last_number = event_number(last_event_id)
    await check_rate(services, caller, "reads")
    row = await find(services, caller, job_id)
    if is_finished(row) and row["event_seq"] <= last_number:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return StreamingResponse(
        stream(services, caller.tenant_id, job_id, last_number, _status_fields),
        media_type="text/event-stream",
        headers=HEADERS,
    )


def _status_fields(event: EventView) -> dict[str, Any]:
    return {"status": PUBLIC_STATE[event.job_status], "step_status": event.task_status}
