"""A job's events as they happen: server-sent events with resume, for every door."""

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
from leasehold.db import reads
from leasehold.db.reads import EventView
from leasehold.domain.errors import Invalid
from leasehold.domain.states import JOB_TERMINAL

#: An idle stream says something this often, in seconds, so that nothing in between takes it for dead.
KEEP_ALIVE = 15.0
HEADERS = {"X-Accel-Buffering": "no"}
#: For a route's `responses`.
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The stream", "content": {"text/event-stream": {}}},
    204: {"description": "Everything was told already."},
}
_BATCH = 500
_LONGEST = 600.0
_HIGHEST = 2**31 - 1
LastEventId: TypeAlias = Annotated[
    Annotated[str, Field(max_length=20, json_schema_extra={"pattern": "^(0|[1-9][0-9]{0,8})$"})] | None, Header()
]
#: Of an event's data, what its job's owner may see.
_SHOWN = ("attempt", "code", "message", "retry_at", "until", "reason", "by", "parts", "forced")


def number_of(last_event_id: str | None) -> int:
    """The event after which to go on. Raises Invalid."""
    if not last_event_id:
        return 0
    if not (last_event_id.isascii() and last_event_id.isdecimal() and int(last_event_id) <= _HIGHEST):
        raise Invalid("invalid_event_id", "Last-Event-ID is the number of an event of this stream.")
    return int(last_event_id)


async def stream(
    services: Services, tenant_id: str, job_id: UUID, after: int, words: Callable[[EventView], dict[str, Any]]
) -> AsyncIterator[bytes]:
    """Ends after the job's last event; or early, when the process stops or the stream is old (a revoked key must
    not listen for ever): the client then resumes. `words`: the door's own names for what happened.
    """
    until = monotonic() + _LONGEST
    ended = expected = False
    while not services.draining and monotonic() < until:
        async with services.pool.acquire() as connection:
            happened = await reads.events_after(connection, tenant_id, job_id, after, _BATCH)
        for one in happened:
            yield _encode(one, words(one))
            after = one.seq
            ended = one.job_status in JOB_TERMINAL
        if len(happened) == _BATCH:
            continue
        if ended or (expected and not happened):  # the latter: the job was forgotten meanwhile
            return
        expected = await services.watch.changed(job_id, after, KEEP_ALIVE)
        if not expected:
            yield KEEPALIVE_COMMENT


def _encode(one: EventView, words: dict[str, Any]) -> bytes:
    told: dict[str, Any] = {"seq": one.seq, "at": one.at, "kind": one.kind, "step": one.step} | words
    told |= {name: one.data[name] for name in _SHOWN if one.data and one.data.get(name) is not None}
    text = orjson.dumps({name: value for name, value in told.items() if value is not None}, option=orjson.OPT_UTC_Z)
    return format_sse_event(data_str=text.decode(), event=one.kind, id=str(one.seq))
