"""The log of a job: what its attempts have logged, a page at a time or as it is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any, TypeAlias
from uuid import UUID

import orjson
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import Field

from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.http.streams import HEADERS, KEEP_ALIVE, MAX_SECONDS, LastEventId, number_of
from leasehold.api.jobs.access import find
from leasehold.api.jobs.jobs import MISSING, Reader
from leasehold.api.jobs.schemas import LogPage
from leasehold.api.process.services import Services, services_of
from leasehold.db import log_reads
from leasehold.db.log_reads import LogFilter
from leasehold.domain.json_values import MAX_INTEGER

router = APIRouter(tags=["jobs"], prefix="/v1/jobs", route_class=CallerFirst)
_MAX_ATTEMPT = 2**31 - 1
_BATCH = 500
_EVENT_STREAM = "text/event-stream"

After: TypeAlias = Annotated[int, Query(ge=0, le=MAX_INTEGER, description="Only lines with a greater number.")]
Limit: TypeAlias = Annotated[int, Query(ge=1, le=1000)]
OfStep: TypeAlias = Annotated[str | None, Query(max_length=200, description="Only lines of this step.")]
OfAttempt: TypeAlias = Annotated[
    int | None, Query(ge=1, le=_MAX_ATTEMPT, description="Only lines of the attempt with this number.")
]
Accept: TypeAlias = Annotated[Annotated[str, Field(max_length=1000)] | None, Header(include_in_schema=False)]

DESCRIPTION = (
    "JSON, a page at a time: `after` is the `next_after` of the page before. With `Accept: text/event-stream` "
    "server-sent events, one for each line as it is written: the stream ends with the job, and a client that "
    "reconnects with `Last-Event-ID` misses no line and gets none twice."
)
INVALID = {HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`, `invalid_request`"}
PAGE_OR_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"description": "The page, or the stream", "content": {_EVENT_STREAM: {}}}
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for."""

    after: int
    limit: int
    lines: LogFilter
    follow: bool


def wanted_of(
    after: int, limit: int, step: str | None, attempt: int | None, last_event_id: str | None, accept: str | None
) -> Wanted:
    """Raises Invalid."""
    seen = number_of(last_event_id) or after
    return Wanted(seen, limit, LogFilter(step, attempt), _EVENT_STREAM in (accept or ""))


@router.get(
    "/{job_id}/logs",
    operation_id="readJobLogs",
    summary="Read or follow what a job logs",
    description=DESCRIPTION,
    response_model=LogPage,
    responses=problems(MISSING | INVALID) | PAGE_OR_STREAM,
)
async def read_job_logs(
    request: Request,
    job_id: UUID,
    caller: Reader,
    after: After = 0,
    limit: Limit = 100,
    step: OfStep = None,
    attempt: OfAttempt = None,
    last_event_id: LastEventId = None,
    accept: Accept = None,
) -> Response:
    services = services_of(request)
    wanted = wanted_of(after, limit, step, attempt, last_event_id, accept)
    found = await find(services, caller, job_id)
    return await logs_of(services, found.caller.tenant_id, job_id, wanted)


async def logs_of(services: Services, tenant_id: str, job_id: UUID, wanted: Wanted) -> Response:
    """The page, or the stream, of a job that the caller may read."""
    if wanted.follow:
        lines = _follow(services, tenant_id, job_id, wanted)
        return StreamingResponse(lines, media_type=_EVENT_STREAM, headers=HEADERS)
    async with services.pool.acquire() as connection:
        read = await log_reads.log_page(connection, tenant_id, job_id, wanted.after, wanted.lines, wanted.limit + 1)
    page = read[: wanted.limit]
    return json_response({"lines": page, "next_after": page[-1]["n"] if len(read) > wanted.limit else None})


async def _follow(services: Services, tenant_id: str, job_id: UUID, wanted: Wanted) -> AsyncIterator[bytes]:
    """The lines as they are written. Ends when the job has ended, when the process stops, or after MAX_SECONDS."""
    until = monotonic() + MAX_SECONDS
    after = number = wanted.after
    while not services.draining and monotonic() < until:
        async with services.pool.acquire() as connection:
            # The numbers first: a line that is written in between is only read twice as early.
            number = (await log_reads.log_numbers(connection, [job_id])).get(job_id, log_reads.ENDED)
            lines = await log_reads.log_page(connection, tenant_id, job_id, after, wanted.lines, _BATCH)
        for line in lines:
            yield format_sse_event(data_str=orjson.dumps(line).decode(), event="line", id=str(line["n"]))
            after = line["n"]
        if len(lines) == _BATCH:
            continue
        if number == log_reads.ENDED:
            return
        if not await services.log_watch.changed(job_id, max(after, number), KEEP_ALIVE):
            yield KEEPALIVE_COMMENT
