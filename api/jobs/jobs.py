"""/v1/jobs/{job_id}: reads, explains, follows, cancels, retries and deletes a job of any kind."""

from __future__ import annotations

from http import HTTPStatus
from time import time
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from leasehold.api.auth.security import JOBS_DELETE, JOBS_OPERATE, JOBS_READ, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.etags import WaitSeconds, matches, may_be_current, weak_etag
from leasehold.api.http.openapi import REFUSED_FOR_NOW, TOO_MANY_CHECKS, problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.http.streams import HEADERS, LastEventId, content_of, event_number, stream
from leasehold.api.jobs.access import JobAccess, find
from leasehold.api.jobs.ending import cancel, delete
from leasehold.api.jobs.explain import explain
from leasehold.api.jobs.retrying import retry
from leasehold.api.jobs.schemas import EventPage, JobAfterAction, JobAnswer, Reason, RetryRequest
from leasehold.api.jobs.view import answer, with_links
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import event_reads
from leasehold.db.event_reads import EventView
from leasehold.domain.json_values import MAX_INTEGER
from leasehold.domain.states import JOB_TERMINAL

router = APIRouter(tags=["jobs"], prefix="/v1/jobs", route_class=AuthenticatedFirst)
# The caller of a route, by the scope that the route demands of the caller's key.
Reader = Annotated[Caller, Depends(Require(JOBS_READ))]
Operator = Annotated[Caller, Depends(Require(JOBS_OPERATE))]
Deleter = Annotated[Caller, Depends(Require(JOBS_DELETE))]

#: The problems of every route here, for the documentation: status -> codes.
MISSING = {HTTPStatus.NOT_FOUND: "`job_not_found`", HTTPStatus.GONE: "`job_deleted`, `job_expired`"}
_EVENT_STREAM = "text/event-stream"


@router.get(
    "/{job_id}",
    operation_id="getJob",
    summary="Get a job of any kind, with its steps, outputs and results",
    response_model=JobAnswer,
    responses=problems(MISSING)
    | {304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}},
)
async def get_job(
    request: Request,
    job_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: WaitSeconds = 0,
) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id)  # the job's row and kind, and the caller
    body = answer(access)
    etag = etag_of(services, access, body)
    # If the client may have this answer already, wait for a change.
    if wait and access.row["finished_at"] is None and may_be_current(if_none_match, etag):
        await services.watch.changed(job_id, access.row["event_seq"], wait)
        access = await find(services, caller, job_id)
        body = answer(access)
        etag = etag_of(services, access, body)
    headers = {"ETag": etag}
    if access.row["status"] not in JOB_TERMINAL:
        headers["Retry-After"] = "1"
    if matches(if_none_match, etag):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return json_response(with_links(services, access, body), headers=headers)


def etag_of(services: Services, access: JobAccess, body: dict[str, Any]) -> str:
    """The weak ETag of the answer without its links (signed URLs of the outputs). If the answer has links, the ETag
    also changes each time half the lifetime of a link has passed. So a client that gets a 304 already has links that
    stay valid for at least half their lifetime.
    """
    has_links = access.kind.signed_links and bool(body["outputs"])
    period = int(time() // (services.settings.download_url_seconds / 2)) if has_links else 0
    return weak_etag(encoded(body) + str(period).encode())


@router.get(
    "/{job_id}/explain",
    operation_id="explainJob",
    summary="Explain why a job is not running, and list what its workers did",
    responses=problems(MISSING),
)
async def explain_job(request: Request, job_id: UUID, caller: Reader) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id)
    # `acting_caller.tenant_id` is the job's tenant. It may differ from the caller's, because operators may read jobs of
    # all tenants.
    return json_response(await explain(services, access.acting_caller.tenant_id, access.row))


@router.get(
    "/{job_id}/events",
    operation_id="streamJobEvents",
    summary="Read or follow the events of a job",
    description="JSON, a page at a time: `after` is the `next_after` of the page before. With `Accept: "
    "text/event-stream` the answer is a stream of server-sent events, one for each change. The stream ends after the "
    "last event, and a client that reconnects with `Last-Event-ID` gets each event exactly once. If the job has ended "
    "and the client has had its last event, the answer is 204.",
    response_model=EventPage,
    responses=problems(MISSING | {HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_event_id`, `invalid_request`"})
    | {
        200: {"description": "The page, or the stream", "content": {_EVENT_STREAM: {}}},
        204: {"description": "The client of a stream has had every event."},
    },
)
async def stream_job_events(
    request: Request,
    job_id: UUID,
    caller: Reader,
    after: Annotated[int, Query(ge=0, le=MAX_INTEGER)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    last_event_id: LastEventId = None,
    accept: Annotated[Annotated[str, Field(max_length=1000)] | None, Header(include_in_schema=False)] = None,
) -> Response:
    services = services_of(request)
    last_number = event_number(last_event_id) or after
    access = await find(services, caller, job_id)
    tenant_id = access.acting_caller.tenant_id
    if _EVENT_STREAM in (accept or ""):
        if access.row["status"] in JOB_TERMINAL and access.row["event_seq"] <= last_number:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        events = stream(services, tenant_id, job_id, last_number, _status_fields)
        return StreamingResponse(events, media_type=_EVENT_STREAM, headers=HEADERS)
    async with services.pool.acquire() as connection:
        rows = await event_reads.events_after(connection, tenant_id, job_id, last_number, limit + 1)
    page = [content_of(event, _status_fields(event)) for event in rows[:limit]]
    return json_response({"events": page, "next_after": rows[limit - 1].seq if len(rows) > limit else None})


def _status_fields(event: EventView) -> dict[str, Any]:
    return {"status": event.job_status, "step_status": event.task_status}


@router.post(
    "/{job_id}/cancel",
    operation_id="cancelJob",
    summary="Ask a job of any kind to stop",
    description="A job that has not started ends immediately. A running step is asked to stop within a second. The "
    "order of a generation is cancelled at its provider. Asking again while the job stops changes nothing.",
    status_code=202,
    response_model=JobAfterAction,
    responses=problems(MISSING | {
        HTTPStatus.CONFLICT: "`resource_invalid_state`: the job has ended; `cancel_not_supported`",
    }),
)  # fmt: skip
async def cancel_job(request: Request, job_id: UUID, caller: Operator, body: Reason | None = None) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id, write=True)
    status = await cancel(services, access, body.reason if body is not None else "")
    return json_response({"id": job_id, "status": status}, HTTPStatus.ACCEPTED)


@router.post(
    "/{job_id}/retry",
    operation_id="retryJob",
    summary="Retry a failed job, from the step that failed or an earlier step",
    description="Steps that succeeded do not run again. A retry is charged as a submission, and waits at the limits "
    "that a new job waits at. To retry a bulk operation, the key also needs the `:write` scope of each kind on which "
    "the operation may act, and `jobs:delete` if it deletes. The operation then goes on in the name of this key, which "
    "pays for its retries.",
    status_code=202,
    response_model=JobAfterAction,
    responses=problems(MISSING | {
        HTTPStatus.NOT_FOUND: "`job_not_found`, `template_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: only a failed job can be retried; `same_scope_running`, "
        "`same_key_running`, `pipeline_not_served`, `template_unreadable`, `order_being_withdrawn`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_payload`, `payload_too_complex`, `payload_fixed`, `unknown_step`, "
        "`skips_other_steps`, `workflow_has_begun`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, {TOO_MANY_CHECKS}",
    }),
)  # fmt: skip
async def retry_job(request: Request, job_id: UUID, caller: Operator, body: RetryRequest | None = None) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id, write=True)
    status, limit_headers = await retry(services, access, body or RetryRequest())
    return json_response({"id": job_id, "status": status}, HTTPStatus.ACCEPTED, limit_headers)


@router.delete(
    "/{job_id}",
    operation_id="deleteJob",
    summary="Delete a job of any kind, with its objects",
    description="An ended job is gone immediately: 204, and 410 from then on. An unfinished job is cancelled, and "
    "deleted when its running steps have stopped: 202.",
    status_code=204,
    responses=problems(MISSING)
    | {202: {"model": JobAfterAction, "description": "The job is deleted when it has stopped."}},
)
async def delete_job(request: Request, job_id: UUID, caller: Deleter) -> Response:
    services = services_of(request)
    access = await find(services, caller, job_id, write=True)
    status = await delete(services, access)
    if status is None:  # the job is deleted
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return json_response({"id": job_id, "status": status}, HTTPStatus.ACCEPTED)
