"""GET /media/{media_id}/events: streams the events of a picture's job. A client can resume the stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse

from leasehold.api.auth.security import MEDIA_READ, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.streams import ANSWERS, HEADERS, LastEventId, event_number, stream
from leasehold.api.media.media import find_media
from leasehold.api.media.view import status_word, step_word
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db.event_reads import EventView
from leasehold.domain.errors import Conflict
from leasehold.domain.states import JOB_TERMINAL

router = APIRouter(tags=["media"], route_class=AuthenticatedFirst)


@router.get(
    "/media/{media_id}/events",
    operation_id="streamMediaEvents",
    summary="Follow a picture's processing",
    description="Server-sent events, one for each change. The stream ends after the last event. A client that "
    "reconnects with `Last-Event-ID` gets each event exactly once. If no event can follow, the answer is 204.",
    response_class=StreamingResponse,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`media_not_found`",
        HTTPStatus.CONFLICT: "`not_submitted`: complete the upload first",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`",
    }) | ANSWERS | {
        200: {"description": "The stream", "content": {"text/event-stream": {"example": (
            'event: claimed\ndata: {"seq":3,"at":"2026-11-20T12:00:01Z","kind":"claimed","status":"PROCESSING",'
            '"step":"resize","step_status":"RUNNING","attempt":1}\nid: 3\n\n'
        )}}},
    },
)  # fmt: skip
async def stream_media_events(
    request: Request,
    media_id: UUID,
    caller: Annotated[Caller, Depends(Require(MEDIA_READ))],
    last_event_id: LastEventId = None,
) -> Response:
    services = services_of(request)
    last_number = event_number(last_event_id)
    media = await find_media(services, caller, media_id)
    if media.job_id is None:
        raise Conflict("not_submitted", "This media has no job yet: complete its upload first.")
    if media.job_status in JOB_TERMINAL and media.job_seq <= last_number:  # the client has the last event
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return StreamingResponse(
        stream(services, caller.tenant_id, media.job_id, last_number, _status_fields),
        media_type="text/event-stream",
        headers=HEADERS,
    )


def _status_fields(event: EventView) -> dict[str, Any]:
    return {
        "status": status_word(event.job_status),
        "step_status": step_word(event.task_status) if event.task_status is not None else None,
    }
