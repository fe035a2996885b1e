"""A media's events as they happen: server-sent events with resume."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any
from uuid import UUID

import orjson
from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event

from api.keyring import Caller
from api.media import find_media
from api.media_view import status_word, step_word
from api.openapi import problems
from api.security import MEDIA_READ, Require
from api.services import Services, services_of
from leasehold import reads
from leasehold.errors import Conflict, Invalid
from leasehold.reads import EventView
from leasehold.states import JOB_TERMINAL

router = APIRouter(tags=["media"])

#: An idle stream says something this often, in seconds, so that nothing in between takes it for dead.
KEEP_ALIVE = 15.0
_BATCH = 500
_LONGEST = 600.0
#: Of an event's data, what its job's owner may see.
_SHOWN = ("attempt", "code", "message", "retry_at", "until")
_HIGHEST = 2**31 - 1


@router.get(
    "/media/{media_id}/events",
    operation_id="streamMediaEvents",
    summary="Follow a picture's processing",
    description="Server-sent events, one for each change, ending after the last. A client that reconnects with "
    "`Last-Event-ID` misses nothing and sees nothing twice; once there is nothing more to come it gets a 204.",
    response_class=StreamingResponse,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`media_not_found`",
        HTTPStatus.CONFLICT: "`not_submitted`: complete the upload first",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`",
    }) | {
        200: {"description": "The stream", "content": {"text/event-stream": {"example": (
            'event: claimed\ndata: {"seq":3,"at":"2026-11-20T12:00:01Z","kind":"claimed","status":"PROCESSING",'
            '"step":"resize","step_status":"RUNNING","attempt":1}\nid: 3\n\n'
        )}}},
        204: {"description": "Everything was told already."},
    },
)  # fmt: skip
async def stream_media_events(
    request: Request,
    media_id: UUID,
    caller: Annotated[Caller, Depends(Require(MEDIA_READ))],
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    services = services_of(request)
    after = _number(last_event_id)
    found = await find_media(services, caller, media_id)
    if found.job_id is None:
        raise Conflict("not_submitted", "This media has no job; its upload was not completed.")
    if found.job_status in JOB_TERMINAL and found.job_seq <= after:
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return StreamingResponse(
        _stream(services, caller.tenant_id, found.job_id, after),
        media_type="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )


def _number(last_event_id: str | None) -> int:
    if not last_event_id:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdecimal() and int(last_event_id) <= _HIGHEST):
        raise Invalid("invalid_event_id", "Last-Event-ID is the number of an event of this stream.")
    return int(last_event_id)


async def _stream(services: Services, tenant_id: str, job_id: UUID, after: int) -> AsyncIterator[bytes]:
    """Ends after the job's last event; or early, when the process stops or the stream is old (a revoked key must
    not listen for ever): the client then resumes.
    """
    until = monotonic() + _LONGEST
    ended = expected = False
    while not services.draining and monotonic() < until:
        happened = await reads.events_after(services.engine, tenant_id, job_id, after, _BATCH)
        for one in happened:
            yield _encode(one)
            after = one.seq
            ended = one.job_status in JOB_TERMINAL
        if len(happened) == _BATCH:
            continue
        if ended or (expected and not happened):  # the latter: the job was forgotten meanwhile
            return
        expected = await services.watch.changed(job_id, after, KEEP_ALIVE)
        if not expected:
            yield KEEPALIVE_COMMENT


def _encode(one: EventView) -> bytes:
    told: dict[str, Any] = {
        "seq": one.seq,
        "at": one.at,
        "kind": one.kind,
        "status": status_word(one.job_status),
        "step": one.step,
        "step_status": step_word(one.task_status) if one.task_status is not None else None,
    }
    told |= {name: one.data[name] for name in _SHOWN if one.data and one.data.get(name) is not None}
    text = orjson.dumps({name: value for name, value in told.items() if value is not None}, option=orjson.OPT_UTC_Z)
    return format_sse_event(data_str=text.decode(), event=one.kind, id=str(one.seq))
