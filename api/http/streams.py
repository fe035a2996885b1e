"""Streams the events of a job as server-sent events. A client can resume a stream. The event endpoints of runs and of
every kind of work use this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Annotated, Any, TypeAlias
from uuid import UUID

import orjson
from fastapi import Header
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import Field

from leasehold.api.process.services import Services
from leasehold.db import event_reads
from leasehold.db.event_reads import EventView
from leasehold.domain.errors import Invalid
from leasehold.domain.states import JOB_TERMINAL

#: Seconds between comments on an idle stream. The comments keep proxies from closing the stream.
KEEP_ALIVE = 15.0
HEADERS = {"X-Accel-Buffering": "no"}  # nginx passes each event on immediately
#: The value of a route's `responses`, for a route that answers with events.
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The stream", "content": {"text/event-stream": {}}},
    204: {"description": "The client has had every event."},
}
#: A stream reads at most this many events at once.
_BATCH = 500
#: A stream ends after this many seconds. To resume the stream, the client needs its API key. So a client whose key was
#: revoked gets events for at most this many seconds.
MAX_SECONDS = 600.0
_MAX_NUMBER = 2**31 - 1  # the largest `integer` of PostgreSQL, the type of the column
#: The type of an endpoint's parameter for the header Last-Event-ID.
LastEventId: TypeAlias = Annotated[
    Annotated[str, Field(max_length=20, json_schema_extra={"pattern": "^[0-9]{0,20}$"})] | None, Header()
]
#: The fields of an event's data that the job's owner may see.
_SHOWN_FIELDS = ("attempt", "code", "message", "retry_at", "until", "reason", "by", "operation", "parts", "forced")


def event_number(last_event_id: str | None) -> int:
    """The number of the last event that the client got; 0 for none. Raises Invalid if the id is no such number."""
    if not last_event_id:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdecimal() and int(last_event_id) <= _MAX_NUMBER):
        raise Invalid("invalid_event_id", "Last-Event-ID must be the id of an event of this stream.")
    return int(last_event_id)


async def stream(
    services: Services, tenant_id: str, job_id: UUID, after: int, fields: Callable[[EventView], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """The job's events with numbers above `after`, as they happen. The stream ends after the job's last event, or when
    the job is deleted. It ends earlier when the process stops, and after MAX_SECONDS. Then the client can resume it.

    `fields`: a function that returns the fields that the endpoint adds to an event.
    """
    ends_at = monotonic() + MAX_SECONDS
    has_ended = has_changed = False
    while not services.draining and monotonic() < ends_at:
        async with services.pool.acquire() as connection:
            batch = await event_reads.events_after(connection, tenant_id, job_id, after, _BATCH)
        for event in batch:
            yield _encode(event, fields(event))
            after = event.seq
            has_ended = event.job_status in JOB_TERMINAL
        if len(batch) == _BATCH:  # there may be more events: read again, without a wait
            has_changed = False  # this batch was the change, so an empty next batch means no deletion
            continue
        was_deleted = has_changed and not batch  # deleting a job is a change without an event
        if has_ended or was_deleted:
            return
        has_changed = await services.watch.changed(job_id, after, KEEP_ALIVE)  # waits at most KEEP_ALIVE seconds
        if not has_changed:
            yield KEEPALIVE_COMMENT


def content_of(event: EventView, fields: dict[str, Any]) -> dict[str, Any]:
    """The event as its job's owner may see it, with the endpoint's own `fields`."""
    content: dict[str, Any] = {"seq": event.seq, "at": event.at, "kind": event.kind, "step": event.step} | fields
    content |= {name: event.data[name] for name in _SHOWN_FIELDS if event.data and event.data.get(name) is not None}
    return {name: value for name, value in content.items() if value is not None}


def _encode(event: EventView, fields: dict[str, Any]) -> bytes:
    text = orjson.dumps(content_of(event, fields), option=orjson.OPT_UTC_Z)
    return format_sse_event(data_str=text.decode(), event=event.kind, id=str(event.seq))
