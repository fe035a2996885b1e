"""The endpoints under `/api/v1/jobs` that create, read, cancel and list conversions.

The module `upload` reads the form of a new conversion. The modules `events`, `result` and `promote` have the other
endpoints of conversions.
"""

from __future__ import annotations

import asyncio
import hashlib
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.audit import AuditedRequire
from leasehold.api.auth.audit import record as record_act
from leasehold.api.auth.security import CONVERSION_READ, CONVERSION_WRITE
from leasehold.api.conversion.rates import check_rate, check_rate_once
from leasehold.api.conversion.upload import (
    FORM,
    MAX_BYTES,
    MAX_SECONDS,
    MEMORY_BYTES,
    StoredForm,
    keys_of,
    prefix_of,
    receive,
)
from leasehold.api.conversion.view import STATES, encoded, is_finished, record
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.callback_urls import REFUSED_URL
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.etags import WaitSeconds, matches, may_be_current
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.multipart import form_too_slow
from leasehold.api.http.openapi import REFUSED_FOR_NOW, multipart, problems
from leasehold.api.http.problems import Problem
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.process.best_effort import best_effort
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.db.clock import database_time
from leasehold.db.database import Connection
from leasehold.domain.errors import BadGateway, Conflict, Gone, LeaseholdError, NotFound, RequestError, StoreError
from leasehold.domain.ids import new_id
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.limits import uploads
from leasehold.limits.admission import queues_of
from leasehold.pipelines.conversion import rows as conversions
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.conversion.rows import Busy, NewConversion, Row
from leasehold.transitions import concurrency, jobs
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

log = structlog.get_logger(__name__)
router = APIRouter(tags=["conversion"], route_class=AuthenticatedFirst)
#: The caller of an endpoint that reads, or that writes. The caller's API key must have this scope.
Reader = Annotated[Caller, Depends(AuditedRequire(CONVERSION_READ))]
Writer = Annotated[Caller, Depends(AuditedRequire(CONVERSION_WRITE))]

#: All endpoints of conversions begin with this path.
PATH = "/api/v1/jobs"
#: How long a finished conversion and its files are kept.
_KEEP_SECONDS = 7 * 24 * 3600


@router.post(
    PATH,
    operation_id="createConversion",
    summary="Send a model to convert",
    description="A multipart form: `model`, `ref_images[]`, `user_id`, `tenant_id`, `model_id`, `version`, "
    "`platform`, `enable_evaluate`, `enable_sim_fp`, `enable_sim_fixed`, `enable_sim_hw`, `accuracy_guard` (layers "
    "stay float where int8 would lose more than a point of top-1 agreement), `preprocessing` (JSON: "
    "`mean`, `scale`, `layout`), `tags` (a JSON object of texts), and `callback_url`: each time the job ends, the "
    "platform sends a `job.*` event to this URL, as to a webhook. The tenant's callback secret signs the event.",
    status_code=201,
    openapi_extra=multipart(FORM, ["model", "user_id", "model_id", "version", "platform"]),
    responses=problems({
        HTTPStatus.BAD_REQUEST: "`bad_request`: the form is malformed",
        HTTPStatus.REQUEST_TIMEOUT: "`body_too_slow`",
        HTTPStatus.CONFLICT: "`job_in_progress`: `job_id` and `Location` name the user's unfinished job, "
        "unless it has just ended",
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "`tflite_unsupported`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `model_missing`, `unsupported_format`, `too_large`, "
        "`bad_reference_images`, `hardware_simulation_unavailable`, `idempotency_key_reused`, "
        f"`invalid_tags`, {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `upload_quota_exceeded`",
        HTTPStatus.BAD_GATEWAY: "`store_unavailable`",
    }),
)  # fmt: skip
async def create_conversion(request: Request, caller: Writer, idempotency_key: IdempotencyKey = None) -> Response:
    services, identity = services_of(request), identity_of(request)
    services.store.require()  # raises StoreAbsent if the installation has no store
    job_id = new_id()
    rate_fields = await check_rate(services, caller, "posts")
    await refuse_early(services, caller, queues_of(caller.tenant_id, conversion), idempotency_key)
    form = await _receive_form(services, caller, request, job_id)
    deadline_seconds = services.settings.conversion_deadline_seconds
    async with services.pool.acquire() as connection:
        deadline_at = await database_time(connection) + timedelta(seconds=deadline_seconds)
    new_conversion = _new_conversion(caller, form, job_id, identity.trace, deadline_at)
    try:
        response = await _create(services, caller, new_conversion, form, idempotency_key)
    except Busy as busy:
        await _clean_up(services, caller, job_id)
        return _in_progress_response(busy, identity.request_id)
    except RequestError:  # a limit of the tenant is reached, or the idempotency key is refused
        await _clean_up(services, caller, job_id)
        raise
    # After any other error it is unknown whether the job was written, so keep its files. If the job was not written,
    # housekeeping (a maintenance loop of the workers) deletes them.
    for name, value in rate_fields.items():
        response.headers.setdefault(name, value)  # does not replace the headers of the tenant's limits
    return response


async def _receive_form(services: Services, caller: Caller, request: Request, job_id: UUID) -> StoredForm:
    """Read the form, and store its files under the prefix of the job. After an error, delete the stored files.

    Raises BodyTooSlow, BadGateway `store_unavailable`, and the other errors of `upload.receive`.
    """
    form_bytes = _announced_bytes(request)
    await _announce_upload(services, caller, job_id, form_bytes)
    try:
        async with services.bodies.room(caller.tenant_id, min(form_bytes, MEMORY_BYTES)):  # waits for free memory
            return await receive(request, services.store, keys_of(job_id), services.settings)
    except TimeoutError:
        await _clean_up(services, caller, job_id)
        raise form_too_slow() from None
    except StoreError as error:
        await _clean_up(services, caller, job_id)
        raise BadGateway("store_unavailable", "The model could not be stored. Try again soon.") from error
    except BaseException:
        await asyncio.shield(_clean_up(services, caller, job_id))
        raise


def _announced_bytes(request: Request) -> int:
    """The size that the Content-Length announces. Without a usable Content-Length: the largest allowed size."""
    content_length = request.headers.get("content-length", "")
    return min(int(content_length), MAX_BYTES) if content_length.isdecimal() else MAX_BYTES


async def _announce_upload(services: Services, caller: Caller, job_id: UUID, form_bytes: int) -> None:
    """Record the prefix of the form's files before the first file is stored, so that housekeeping deletes the files if
    no job is written. Raises TooMany `upload_quota_exceeded`.
    """
    async with services.pool.acquire() as connection, connection.transaction():
        await uploads.open_upload(
            connection,
            services.settings,
            caller.tenant_id,
            prefix_of(job_id),
            counted_bytes=form_bytes,
            at_most=MAX_BYTES,
            seconds=MAX_SECONDS,
            room=services.admission.upload_room,  # counts the bytes of each tenant's unfinished uploads
        )


async def _create(
    services: Services, caller: Caller, new_conversion: NewConversion, form: StoredForm, idempotency_key: str | None
) -> Response:
    """Write the job and answer 201. A repeated request gets the first answer. This function then deletes the files
    that the repeated request sent.
    """
    submissions: list[Submitted] = []  # the new job; stays empty for a repeated request
    limit_fields: dict[str, str] = {}  # the RateLimit headers
    queues = queues_of(caller.tenant_id, conversion)

    async def write_job(connection: Connection) -> Answer:
        stored_bytes = form.model_bytes + form.image_bytes
        # `submitting` charges the caller's tenant and key (`payer`), and checks their limits.
        async with services.admission.submitting(connection, caller.payer, queues, size=stored_bytes) as charge:
            submissions.append(await conversions.create(connection, new_conversion))
        if not await uploads.keep_prefix(connection, caller.tenant_id, prefix_of(new_conversion.job.id)):
            raise form_too_slow()  # the form took so long that housekeeping has deleted its files
        limit_fields.update(charge.fields)
        row = await conversions.find(connection, caller.tenant_id, new_conversion.job.id)
        assert row is not None
        return Answer(HTTPStatus.CREATED, encoded(record(row)))

    answer = await once(services.pool, caller.tenant_id, idempotency_key, form.fingerprint, write_job)
    for submitted in submissions:
        # Send the hints (messages that tell workers of new tasks), and admit jobs that wait at concurrency limits.
        await publish_and_admit(services, submitted.hints, submitted.limits)
        SUBMITTED.labels(conversion.name).inc()
        log.info("job submitted", job_id=str(new_conversion.job.id), bytes=form.model_bytes)
    if not submissions:  # no job uses the files of this request
        await _clean_up(services, caller, new_conversion.job.id)
    headers = limit_fields | {"Location": f"{PATH}/{orjson.loads(answer.body)['job_id']}"}
    return Response(answer.body, answer.status_code, headers, media_type="application/json")


def _new_conversion(
    caller: Caller, form: StoredForm, job_id: UUID, trace: dict[str, str], deadline_at: datetime
) -> NewConversion:
    keys = keys_of(job_id)
    job = NewJob(
        pipeline=conversion,
        tenant_id=caller.tenant_id,
        params=form.params.model_dump(mode="json"),
        inputs=keys,
        output_prefix=f"jobs/{job_id}",
        keep_seconds=_KEEP_SECONDS,
        deadline_at=deadline_at,
        trace=trace,
        id=job_id,
        exclusive_key=form.user_id,  # one unfinished conversion for each user
        tags=form.tags,
        callback_url=form.callback_url,
    )
    input_record = {
        "filename": form.file_name,
        "object_key": keys["model"],
        "size_bytes": form.model_bytes,
        "ref_images_count": form.image_count,
        "ref_images_bytes": form.image_bytes,
    }
    return NewConversion(job, form.user_id, caller.client_id, form.owner_tenant, form.file_name, input_record)


async def _clean_up(services: Services, caller: Caller, job_id: UUID) -> None:
    """Delete the stored files of a refused job. If an outage prevents this, housekeeping deletes them later."""
    is_deleted = True
    try:
        await services.store.delete(*keys_of(job_id).values())
    except LeaseholdError as error:
        log.warning("objects of a refused job are left", job_id=str(job_id), error=type(error).__name__)
        is_deleted = False
    with best_effort("deletions of refused forms"):
        async with services.pool.acquire() as connection:
            if is_deleted:
                await uploads.forget(connection, caller.tenant_id, prefix_of(job_id))
            else:
                # `keep=None`: housekeeping then deletes objects of any size.
                await uploads.close(connection, caller.tenant_id, prefix_of(job_id), keep=None)


def _in_progress_response(busy: Busy, request_id: str) -> Response:
    """The answer 409 to a user who has an unfinished conversion already. `busy.job_id`: the id of that conversion, or
    None if it has just ended.
    """
    if busy.job_id is None:
        headers, message = {}, "The user's other conversion has just ended: send the request again."
    else:
        headers = {"Location": f"{PATH}/{busy.job_id}"}
        message = f"The user has an unfinished conversion: {busy.job_id}."
    problem = Problem(HTTPStatus.CONFLICT, "job_in_progress", message, headers)
    response = problem.response(request_id)
    response.body = encoded(problem.body(request_id) | {"job_id": busy.job_id})
    response.headers["Content-Length"] = str(len(response.body))
    return response


@router.get(
    f"{PATH}/{{job_id}}",
    operation_id="getConversion",
    summary="Get the state and the results of a conversion",
    responses=problems(
        {
            HTTPStatus.NOT_FOUND: "`job_not_found`",
            HTTPStatus.GONE: "`expired`",
            HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
            HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`",
        }
    )
    | {304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}},
)
async def get_conversion(
    request: Request,
    job_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: WaitSeconds = 0,
) -> Response:
    services = services_of(request)
    rate_fields = await check_rate(services, caller, "reads")
    row = await find(services, caller, job_id)
    if wait and not is_finished(row) and may_be_current(if_none_match, _etag(row)):
        await services.watch.changed(job_id, row["event_seq"], wait)  # until the next event, at most `wait` seconds
        row = await find(services, caller, job_id)
    headers = rate_fields | {"ETag": _etag(row)} | ({} if is_finished(row) else {"Retry-After": "1"})
    if matches(if_none_match, headers["ETag"]):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(encoded(record(row)), headers=headers, media_type="application/json")


def _etag(row: Row) -> str:
    """The ETag of the record: a hash of its bytes. The number of the last event is not enough, because progress and
    promotion change the record without an event.
    """
    return f'"{hashlib.sha256(encoded(record(row))).hexdigest()[:32]}"'


async def find(services: Services, caller: Caller, job_id: UUID) -> Row:
    """The row of the caller's conversion. Raises NotFound (also for another tenant's conversion), or Gone."""
    async with services.pool.acquire() as connection:
        row = await conversions.find(connection, caller.tenant_id, job_id)
        # The platform remembers a deleted conversion for 90 days (`REMEMBER_EXPIRED`), and answers 410 for as long.
        is_remembered = row is None and await conversions.is_expired(connection, caller.tenant_id, job_id)
    if is_remembered or (row is not None and row["expired"]):
        raise Gone("expired", "The conversion has expired.")
    if row is None:
        raise NotFound("job_not_found", "There is no such conversion.")
    return row


class CancelRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500, description="A reason for people, stored with the job.")


@router.post(
    f"{PATH}/{{job_id}}/cancel",
    operation_id="cancelConversion",
    summary="Cancel a conversion, so that its user may send another",
    description="A conversion that no worker has started ends immediately; a running step is stopped within seconds. "
    "Asking again while the conversion stops changes nothing.",
    status_code=202,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`job_not_found`",
        HTTPStatus.CONFLICT: "`resource_invalid_state`: the conversion has ended",
        HTTPStatus.GONE: "`expired`",
        HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`",
    }),
)  # fmt: skip
async def cancel_conversion(
    request: Request, job_id: UUID, caller: Writer, body: CancelRequest | None = None
) -> Response:
    services = services_of(request)
    rate_fields = await check_rate(services, caller, "posts")
    await find(services, caller, job_id)  # raises NotFound for a job of another kind
    async with services.pool.acquire() as connection:
        limit_names = await concurrency.limits_of(connection, [job_id])
        reason = body.reason if body is not None else ""
        async with connection.transaction():
            cancellation = await jobs.request_cancel(
                connection, [job_id], caller.tenant_id, reason=reason, by=f"client {caller.client_id}"
            )
            if cancellation.states:
                await record_act(connection, caller, "job.cancelled", job_id, kind="conversion", reason=reason or None)
    count_ended_jobs(cancellation.ended)
    status = cancellation.states.get(job_id)  # None: this request has not cancelled the job
    if status in JOB_TERMINAL:  # the cancelled job has left its concurrency limits, so admit the jobs that wait there
        await publish_and_admit(services, [], limit_names, [job_id])
    row = await find(services, caller, job_id)
    if status is None and row["status"] != JobState.CANCEL_REQUESTED:
        raise Conflict("resource_invalid_state", f"The conversion is {record(row)['status']}: it cannot be cancelled.")
    return Response(encoded(record(row)), HTTPStatus.ACCEPTED, rate_fields, media_type="application/json")


@router.get(
    PATH,
    operation_id="listConversions",
    summary="List conversions, newest first",
    responses=problems(
        {
            HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `invalid_cursor`",
            HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`",
        }
    ),
)
@may_read_standby
async def list_conversions(
    request: Request,
    response: Response,
    caller: Reader,
    user_id: Annotated[str | None, Query(max_length=128)] = None,
    status: Literal["created", "running", "completed", "failed"] | None = None,
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    services = services_of(request)
    response.headers.update(await check_rate_once(request, services, caller, "reads"))
    before, states = id_of_cursor(cursor), None if status is None else STATES[status]
    async with services.pool.acquire() as connection:
        rows, total = await conversions.newest(
            connection, caller.tenant_id, user_id=user_id, states=states, before=before, limit=limit + 1
        )
    page = rows[:limit]
    next_cursor = cursor_of(page[-1]["job_id"]) if len(rows) > limit else None
    return {"jobs": [record(row) for row in page], "total": total, "next_cursor": next_cursor}
