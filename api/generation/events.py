"""GET /v1/images/events and /v1/video/events: streams the events of a generation as they happen. A client can resume
the stream.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from leasehold.api.auth.security import GENERATION_READ, Require
from leasehold.api.generation.schemas import TASK_ID
from leasehold.api.generation.view import STATUS_NUMBERS, StatusText, is_finished
from leasehold.api.http.openapi import problems
from leasehold.api.http.streams import ANSWERS, HEADERS, LastEventId, event_number, stream
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db.event_reads import EventView
from leasehold.domain.errors import NotFound
from leasehold.domain.states import JOB_TERMINAL, JobState, TaskState
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.generation.provider import Kind

router = APIRouter(tags=["generation"])
#: The caller of an endpoint. The caller's API key must have this scope.
Reader = Annotated[Caller, Depends(Require(GENERATION_READ))]
TaskId = Annotated[str, Query(pattern=TASK_ID)]

#: The common parts of the two routes.
_ROUTE = {
    "description": "Server-sent events, one for each change. The stream ends after the last event. A client that "
    "reconnects with `Last-Event-ID` gets each event exactly once. If no event can follow, the answer is 204.",
    "response_class": StreamingResponse,
    "responses": problems({
        HTTPStatus.NOT_FOUND: "`task_not_found`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`, `invalid_request`",
    }) | ANSWERS,
}  # fmt: skip
#: The states of the step `submit` for which `GET /v1/images/query` and `GET /v1/video/query` answer "processing".
_PROCESSING = frozenset({TaskState.RUNNING, TaskState.RETRY, TaskState.WAITING})


@router.get("/v1/images/events", operation_id="streamImagesEvents", summary="Follow images", **_ROUTE)  # type: ignore[arg-type]  # values of several types
async def stream_images_events(
    request: Request, caller: Reader, task_id: TaskId, last_event_id: LastEventId = None
) -> Response:
    return await _stream(request, caller, "image", task_id, last_event_id)


@router.get("/v1/video/events", operation_id="streamVideoEvents", summary="Follow a video", **_ROUTE)  # type: ignore[arg-type]  # as above
async def stream_video_events(
    request: Request, caller: Reader, task_id: TaskId, last_event_id: LastEventId = None
) -> Response:
    return await _stream(request, caller, "video", task_id, last_event_id)


async def _stream(request: Request, caller: Caller, kind: Kind, task_id: str, last_event_id: str | None) -> Response:
    services = services_of(request)
    last_number = event_number(last_event_id)
    async with services.pool.acquire() as connection:
        row = await generations.find(connection, caller.tenant_id, task_id, kind)
    if row is None:
        raise NotFound("task_not_found", "There is no such generation.")
    if is_finished(row) and row["event_seq"] <= last_number:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return StreamingResponse(
        stream(services, caller.tenant_id, row["job_id"], last_number, _status_fields),
        media_type="text/event-stream",
        headers=HEADERS,
    )


def _status_fields(event: EventView) -> dict[str, Any]:
    text = _status_text(event)
    return {} if text is None else {"status": STATUS_NUMBERS.get(text, 0), "status_text": text}


def _status_text(event: EventView) -> StatusText | None:
    """The status that `GET /v1/images/query` or `GET /v1/video/query` answers after this event. Returns None if the
    event does not change the status.
    """
    if event.job_status in JOB_TERMINAL:
        return "completed" if event.job_status == JobState.SUCCEEDED else "failed"
    if event.step is None:
        return "pending" if event.kind in ("submitted", "queued", "admitted") else None
    # A step after `submit`. While it is blocked, it waits for `submit`, whose own events decide about the status.
    if event.step != "submit":
        return None if event.task_status == TaskState.BLOCKED else "polling"
    if event.task_status == TaskState.SUCCEEDED:
        return "polling"
    return "processing" if event.task_status in _PROCESSING else "pending"
