"""GET /v1/jobs/{job_id}/logs and /stream: reads or follows a job's log lines, and the chunks that its steps emit."""

from __future__ import annotations

from uuid import UUID

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.sse import format_sse_event

from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.jobs.access import find
from leasehold.api.jobs.following import INVALID, PAGE_OR_SSE, Item, ItemsQuery, Source, answer
from leasehold.api.jobs.jobs import MISSING, Reader
from leasehold.api.jobs.schemas import LogPage, StreamPage
from leasehold.api.process.services import services_of
from leasehold.db import log_reads

router = APIRouter(tags=["jobs"], prefix="/v1/jobs", route_class=AuthenticatedFirst)

LOG_DESCRIPTION = (
    "JSON, a page at a time: `after` is the `next_after` of the page before. With `Accept: text/event-stream` "
    "server-sent events, one for each line as it is written: the stream ends with the job, and a client that "
    "reconnects with `Last-Event-ID` gets each line exactly once."
)
STREAM_DESCRIPTION = (
    "With `Accept: text/event-stream` server-sent events: `chunk` for each chunk as it is emitted; `restart` when a "
    "step runs again, after which the chunks of its earlier attempts are void; `cut` where an attempt has emitted too "
    "much. The stream ends with the job. A client that reconnects with `Last-Event-ID` gets each chunk exactly "
    "once. Else JSON, a page at a time: `after` is the `next_after` of the page before."
)


def _line_event(item: Item) -> bytes:
    return format_sse_event(data_str=orjson.dumps(item).decode(), event="line", id=str(item["n"]))


def _chunk_events(item: Item) -> bytes:
    """The chunk as an event. If a later attempt of the step begins with this chunk, a `restart` event comes before the
    chunk. The `restart` has no id. So a client whose connection breaks between the two events resumes before the
    `restart`, and gets both.
    """
    restart_event = b""
    if item["restarts"]:
        restart = {name: item[name] for name in ("step", "attempt", "epoch")}
        restart_event = format_sse_event(data_str=orjson.dumps(restart).decode(), event="restart")
    # Leave out members that the events replace: a `cut` event replaces `cut`, and a `restart` event replaces `restarts`
    # and `superseded` (the step's earlier chunks are void).
    content = {name: value for name, value in item.items() if name not in ("restarts", "superseded", "cut")}
    event = "cut" if "cut" in item else "chunk"
    return restart_event + format_sse_event(data_str=orjson.dumps(content).decode(), event=event, id=str(item["n"]))


# A Source has the name of the items in a page, a function that reads a page, a function that reads the number of each
# job's last item, and a function that makes an event of an item.
LOG = Source("lines", log_reads.log_page, log_reads.log_numbers, _line_event)
STREAM = Source("chunks", log_reads.stream_page, log_reads.stream_numbers, _chunk_events)


@router.get(
    "/{job_id}/logs",
    operation_id="readJobLogs",
    summary="Read or follow what a job logs",
    description=LOG_DESCRIPTION,
    response_model=LogPage,
    responses=problems(MISSING | INVALID) | PAGE_OR_SSE,
)
async def read_job_logs(request: Request, job_id: UUID, caller: Reader, query: ItemsQuery) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id)
    # Read as the job's tenant, because an operator may also read jobs of other tenants.
    tenant_id = access.acting_caller.tenant_id
    return await answer(services, LOG, services.log_watch, tenant_id, job_id, query)


@router.get(
    "/{job_id}/stream",
    operation_id="readJobStream",
    summary="Read or follow what a job emits",
    description=STREAM_DESCRIPTION,
    response_model=StreamPage,
    responses=problems(MISSING | INVALID) | PAGE_OR_SSE,
)
async def read_job_stream(request: Request, job_id: UUID, caller: Reader, query: ItemsQuery) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id)
    # Read as the job's tenant, because an operator may also read jobs of other tenants.
    tenant_id = access.acting_caller.tenant_id
    return await answer(services, STREAM, services.stream_watch, tenant_id, job_id, query)
