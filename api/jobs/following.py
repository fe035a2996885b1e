"""Answers requests for the numbered items that a job's attempts write: lines of the log, or chunks of the stream.

A client reads the items page by page, or follows them. A client that follows the items gets each new item as soon as an
attempt has written it. The endpoints for the logs and streams of jobs and runs use this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from fastapi import Depends, Header, Query, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT
from pydantic import Field

from leasehold.api.http.responses import json_response
from leasehold.api.http.streams import HEADERS, KEEP_ALIVE, MAX_SECONDS, LastEventId, event_number
from leasehold.api.process.services import Services
from leasehold.api.process.watch import JobWatch
from leasehold.db.database import Connection
from leasehold.db.log_reads import ENDED, LogFilter
from leasehold.domain.json_values import MAX_INTEGER
from leasehold.domain.step_names import MAX_STEP_NAME

#: The largest value of PostgreSQL's type `integer`, which is the type of the column `attempt`.
_MAX_ATTEMPT = 2**31 - 1
#: While a client follows the items, the API reads at most this many at once.
_BATCH = 500
#: The content type of server-sent events. A client that accepts this type follows the items.
EVENT_STREAM = "text/event-stream"

_After: TypeAlias = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Only items with a greater number.")]
_Limit: TypeAlias = Annotated[int, Query(ge=1, le=1000)]
_OfStep: TypeAlias = Annotated[str | None, Query(max_length=MAX_STEP_NAME, description="Only items of this step.")]
_OfAttempt: TypeAlias = Annotated[
    int | None, Query(ge=1, le=_MAX_ATTEMPT, description="Only items of the attempt with this number.")
]
_Accept: TypeAlias = Annotated[Annotated[str, Field(max_length=1000)] | None, Header(include_in_schema=False)]

#: For the API reference: the problems of a request with an invalid query or header.
INVALID = {HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`, `invalid_request`"}
#: The two forms of a successful answer: a page of JSON, or server-sent events.
PAGE_OR_SSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The page, or the stream", "content": {EVENT_STREAM: {}}}
}

Item: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """How to read and encode one sort of items. `member`: the member of a JSON page that holds the items. `read_page`:
    reads a page, by the tenant, the job, the number of the last item before the page, the filter, and the limit.
    `read_last_numbers`: reads the number of the last item of each job, or the special number ENDED for a job that has
    ended. `encode_events`: encodes an item as server-sent events.
    """

    member: str
    read_page: Callable[[Connection, str, UUID, int, LogFilter, int], Awaitable[Sequence[Item]]]
    read_last_numbers: Callable[[Connection, Iterable[UUID]], Awaitable[dict[UUID, int]]]
    encode_events: Callable[[Item], bytes]


@dataclass(frozen=True, slots=True)
class ItemQuery:
    """The items that a request asks for: at most `limit` with numbers above `after`. `follow`: send the items as
    server-sent events, ignore `limit`, and go on with further items as they are written.
    """

    after: int
    limit: int
    filter: LogFilter
    follow: bool


def _query_of(
    after: _After = 0,
    limit: _Limit = 100,
    step: _OfStep = None,
    attempt: _OfAttempt = None,
    last_event_id: LastEventId = None,
    accept: _Accept = None,
) -> ItemQuery:
    """The ItemQuery of a request. Raises Invalid for a `Last-Event-ID` that is no number."""
    return ItemQuery(
        event_number(last_event_id) or after, limit, LogFilter(step, attempt), EVENT_STREAM in (accept or "")
    )


#: The parameter of an endpoint that answers with items. FastAPI makes it from the URL's query and the headers.
ItemsQuery: TypeAlias = Annotated[ItemQuery, Depends(_query_of)]


async def answer(
    services: Services, source: Source, watch: JobWatch, tenant_id: str, job_id: UUID, query: ItemQuery
) -> Response:
    """Answer with a page or a stream of the job's items. The endpoint must have checked that the caller may read the
    job.
    """
    if query.follow:
        events = _follow(services, source, watch, tenant_id, job_id, query)
        return StreamingResponse(events, media_type=EVENT_STREAM, headers=HEADERS)
    async with services.pool.acquire() as connection:
        # Read one item more than the page has, to learn whether further items follow.
        rows = await source.read_page(connection, tenant_id, job_id, query.after, query.filter, query.limit + 1)
    page = rows[: query.limit]
    return json_response({source.member: page, "next_after": page[-1]["n"] if len(rows) > query.limit else None})


async def _follow(
    services: Services, source: Source, watch: JobWatch, tenant_id: str, job_id: UUID, query: ItemQuery
) -> AsyncIterator[bytes]:
    """Send the items as they are written. Ends when the job has ended, when the process stops, or after MAX_SECONDS."""
    ends_at = monotonic() + MAX_SECONDS
    last_sent = query.after
    while not services.draining and monotonic() < ends_at:
        async with services.pool.acquire() as connection:
            # Read the last number before the page. In the opposite order, an item that is written between the two
            # queries would be missed, because the wait below is only for newer items, and because the stream ends if
            # the job has ended.
            last_number = (await source.read_last_numbers(connection, [job_id])).get(job_id, ENDED)
            page = await source.read_page(connection, tenant_id, job_id, last_sent, query.filter, _BATCH)
        for item in page:
            yield source.encode_events(item)
            last_sent = item["n"]
        if len(page) == _BATCH:
            continue
        if last_number == ENDED:
            return
        # Wait for an item that is newer than all items of the job, and not only newer than the last sent item.
        # Otherwise an item that the filter leaves out would end the wait immediately, again and again.
        if not await watch.changed(job_id, max(last_sent, last_number), KEEP_ALIVE):
            yield KEEPALIVE_COMMENT
