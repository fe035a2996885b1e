"""/api/v1/jobs: send a model to convert, poll the conversion, cancel it, list conversions."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

import orjson
import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.audit import AuditedRequire, audit
from leasehold.api.auth.security import CONVERSION_READ, CONVERSION_WRITE
from leasehold.api.conversion.rates import check_rate
from leasehold.api.conversion.upload import (
    FORM,
    MAX_BYTES,
    MAX_SECONDS,
    MEMORY_BYTES,
    Sent,
    keys_of,
    prefix_of,
    receive,
)
from leasehold.api.conversion.view import STATES, encoded, is_finished, record
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_at
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.etags import matches
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import REFUSED_FOR_NOW, multipart, problems
from leasehold.api.http.problems import Problem
from leasehold.api.http.responses import follow_up
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED
from leasehold.api.process.services import Services, services_of
from leasehold.db.database import Connection
from leasehold.domain.errors import BadGateway, Conflict, Gone, LeaseholdError, NotFound, RequestError, StoreError
from leasehold.domain.ids import new_id
from leasehold.domain.states import JOB_TERMINAL, JobState
from leasehold.exporter.jobs import jobs_ended
from leasehold.limits import uploads
from leasehold.limits.admission import queues_of
from leasehold.pipelines.conversion import rows as conversions
from leasehold.pipelines.conversion.pipeline import conversion
from leasehold.pipelines.conversion.rows import Busy, NewConversion, Row
from leasehold.transitions import gates, jobs
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

log = structlog.get_logger(__name__)
router = APIRouter(tags=["conversion"], route_class=CallerFirst)
Reader = Annotated[Caller, Depends(AuditedRequire(CONVERSION_READ))]
Writer = Annotated[Caller, Depends(AuditedRequire(CONVERSION_WRITE))]

PATH = "/api/v1/jobs"
_KEPT_SECONDS = 7 * 24 * 3600
_SLOW = Problem(
    HTTPStatus.REQUEST_TIMEOUT, "body_too_slow", "The form did not arrive in time.", {"Connection": "close"}
)


@router.post(
    PATH,
    operation_id="createConversion",
    summary="Send a model to convert",
    description="A multipart form: `model`, `ref_images[]`, `user_id`, `tenant_id`, `model_id`, `version`, "
    "`platform`, `enable_evaluate`, `enable_sim_fp`, `enable_sim_fixed`, `enable_sim_hw`, and `preprocessing` (JSON: "
    "`mean`, `scale`, `layout`).",
    status_code=201,
    openapi_extra=multipart(FORM, ["model", "user_id", "model_id", "version", "platform"]),
    responses=problems({
        HTTPStatus.BAD_REQUEST: "`bad_request`: the form is malformed",
        HTTPStatus.REQUEST_TIMEOUT: "`body_too_slow`",
        HTTPStatus.CONFLICT: "`job_in_progress`: `job_id` and `Location` name the user's unfinished job",
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "`tflite_unsupported`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `model_missing`, `unsupported_format`, `too_large`, "
        "`bad_reference_images`, `hardware_simulation_unavailable`, `idempotency_key_reused`",
        HTTPStatus.TOO_MANY_REQUESTS: f"{REFUSED_FOR_NOW}, `upload_quota_exceeded`",
        HTTPStatus.BAD_GATEWAY: "`store_unavailable`",
    }),
)  # fmt: skip
async def create_conversion(request: Request, caller: Writer, idempotency_key: IdempotencyKey = None) -> Response:
    services, identity = services_of(request), identity_of(request)
    services.store.require()
    job_id = new_id()
    keys = keys_of(job_id)
    limited = await check_rate(services, caller, "posts")
    await refuse_early(services, caller, queues_of(caller.tenant_id, conversion), idempotency_key)
    size = _announced(request)
    await _announce_upload(services, caller, job_id, size)
    try:
        async with services.bodies.room(caller.tenant_id, min(size, MEMORY_BYTES)):
            sent = await receive(request, services.store, keys, services.settings)
    except TimeoutError:
        await _clean_up(services, caller, job_id)
        return _SLOW.response(identity.request_id)
    except StoreError as error:
        await _clean_up(services, caller, job_id)
        raise BadGateway("store_unavailable", "The model could not be stored. Try again soon.") from error
    except BaseException:
        await asyncio.shield(_clean_up(services, caller, job_id))
        raise
    new = _new(caller, sent, job_id, keys, identity.trace, services.settings.conversion_deadline_seconds)
    try:
        created = await _created(services, caller, new, sent, idempotency_key)
    except Busy as busy:
        await _clean_up(services, caller, job_id)
        return _in_progress(busy, identity.request_id)
    except RequestError:  # of the idempotency key
        await _clean_up(services, caller, job_id)
        raise
    # After any other error the job may or may not be written. If it is not, the sweeper deletes what was stored.
    for name, value in limited.items():
        created.headers.setdefault(name, value)  # the fields of the tenant's limits go first
    return created


def _announced(request: Request) -> int:
    """The announced size of the form; the largest allowed size if none is announced."""
    announced = request.headers.get("content-length", "")
    return min(int(announced), MAX_BYTES) if announced.isdecimal() else MAX_BYTES


async def _announce_upload(services: Services, caller: Caller, job_id: UUID, size: int) -> None:
    """Record where the form will be stored, before anything is stored: the sweeper deletes what no job claims."""
    async with services.pool.acquire() as connection, connection.transaction():
        await uploads.open_upload(
            connection,
            services.settings,
            caller.tenant_id,
            prefix_of(job_id),
            counted=size,
            at_most=MAX_BYTES,
            seconds=MAX_SECONDS,
        )


async def _created(
    services: Services, caller: Caller, new: NewConversion, sent: Sent, idempotency_key: str | None
) -> Response:
    made: list[Submitted] = []
    limited: dict[str, str] = {}
    queues = queues_of(caller.tenant_id, conversion)

    async def work(connection: Connection) -> Answer:
        async with services.admission.submitting(connection, caller.payer, queues, size=sent.model_bytes) as paid:
            made.append(await conversions.create(connection, new))
        await uploads.forget(connection, caller.tenant_id, prefix_of(new.job.id))
        limited.update(paid.fields)
        row = await conversions.find(connection, caller.tenant_id, new.job.id)
        assert row is not None
        return Answer(HTTPStatus.CREATED, encoded(record(row)))

    answer = await once(services.pool, caller.tenant_id, idempotency_key, sent.fingerprint, work)
    for submitted in made:
        await follow_up(services, submitted.hints, submitted.gates)
        SUBMITTED.labels(conversion.name).inc()
        log.info("job submitted", job_id=str(new.job.id), bytes=sent.model_bytes)
    if not made:  # a repeated request got its first answer: no job has what was just stored
        await _clean_up(services, caller, new.job.id)
    headers = limited | {"Location": f"{PATH}/{orjson.loads(answer.body)['job_id']}"}
    return Response(answer.body, answer.status_code, headers, media_type="application/json")


def _new(
    caller: Caller, sent: Sent, job_id: UUID, keys: dict[str, str], trace: dict[str, str], deadline_seconds: int
) -> NewConversion:
    job = NewJob(
        pipeline=conversion,
        tenant_id=caller.tenant_id,
        params=sent.params.model_dump(mode="json"),
        inputs=keys,
        output_prefix=f"jobs/{job_id}",
        keep_seconds=_KEPT_SECONDS,
        deadline_at=datetime.now(UTC) + timedelta(seconds=deadline_seconds),
        trace=trace,
        id=job_id,
        exclusive_key=sent.user_id,
    )
    said = {
        "filename": sent.file_name,
        "object_key": keys["model"],
        "size_bytes": sent.model_bytes,
        "ref_images_count": sent.images,
    }
    return NewConversion(job, sent.user_id, caller.client_id, sent.owner_tenant, sent.file_name, said)


async def _clean_up(services: Services, caller: Caller, job_id: UUID) -> None:
    """Delete what a refused job has stored. If the store is down, the sweeper deletes it later."""
    try:
        await services.store.delete(*keys_of(job_id).values())
    except LeaseholdError as error:
        log.warning("objects of a refused job are left", job_id=str(job_id), error=type(error).__name__)
        async with services.pool.acquire() as connection:
            await uploads.close(connection, caller.tenant_id, prefix_of(job_id), keep=None)
        return
    async with services.pool.acquire() as connection:
        await uploads.forget(connection, caller.tenant_id, prefix_of(job_id))


def _in_progress(busy: Busy, request_id: str) -> Response:
    headers = {} if busy.job_id is None else {"Location": f"{PATH}/{busy.job_id}"}
    said = f"The user has an unfinished conversion: {busy.job_id}."
    problem = Problem(HTTPStatus.CONFLICT, "job_in_progress", said, headers)
    answer = problem.response(request_id)
    answer.body = encoded(problem.body(request_id) | {"job_id": busy.job_id})
    answer.headers["Content-Length"] = str(len(answer.body))
    return answer


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
    wait: Annotated[
        float, Query(ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for a change, if unfinished.")
    ] = 0,
) -> Response:
    services = services_of(request)
    limited = await check_rate(services, caller, "reads")
    row = await find(services, caller, job_id)
    if wait and not is_finished(row) and (if_none_match is None or matches(if_none_match, _etag(row))):
        await services.watch.changed(job_id, row["event_seq"], wait)
        row = await find(services, caller, job_id)
    headers = limited | {"ETag": _etag(row)} | ({} if is_finished(row) else {"Retry-After": "1"})
    if matches(if_none_match, headers["ETag"]):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(encoded(record(row)), headers=headers, media_type="application/json")


def _etag(row: Row) -> str:
    """The record's version: its bytes, for progress and promotion change it without an event."""
    return f'"{hashlib.sha256(encoded(record(row))).hexdigest()[:32]}"'


async def find(services: Services, caller: Caller, job_id: UUID) -> Row:
    """Raises NotFound; another tenant's conversion is not there."""
    async with services.pool.acquire() as connection:
        found = await conversions.find(connection, caller.tenant_id, job_id)
        if found is None and await conversions.is_expired(connection, caller.tenant_id, job_id):
            raise Gone("expired", "The conversion has expired, and was deleted.")
    if found is None:
        raise NotFound("job_not_found", "There is no such conversion.")
    if found["expired"]:
        raise Gone("expired", "The conversion has expired.")
    return found


class CancelRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str = Field("", max_length=500, description="A reason for people, stored with the job.")


@router.post(
    f"{PATH}/{{job_id}}/cancel",
    operation_id="cancelConversion",
    summary="Cancel a conversion, so that its user may send another",
    description="A conversion that no worker has started ends at once; a running step is stopped within seconds. "
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
    request: Request, job_id: UUID, caller: Writer, asked: CancelRequest | None = None
) -> Response:
    services = services_of(request)
    limited = await check_rate(services, caller, "posts")
    await find(services, caller, job_id)  # a job of another kind is no conversion: 404
    async with services.pool.acquire() as connection:
        names = await gates.gates_of(connection, [job_id])
        cancels = await jobs.request_cancel(
            connection,
            [job_id],
            caller.tenant_id,
            reason=asked.reason if asked is not None else "",
            by=f"client {caller.client_id}",
        )
    jobs_ended(cancels.ended)
    status = cancels.states.get(job_id)
    if status in JOB_TERMINAL:
        await follow_up(services, [], names, [job_id])
    row = await find(services, caller, job_id)
    if status is None and row["status"] != JobState.CANCEL_REQUESTED:
        raise Conflict("resource_invalid_state", f"The conversion is {record(row)['status']}: it cannot be cancelled.")
    audit("job.cancelled", request, caller, job_id=str(job_id))
    return Response(encoded(record(row)), HTTPStatus.ACCEPTED, limited, media_type="application/json")


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
    response.headers.update(await check_rate(services, caller, "reads"))
    before, states = id_at(cursor), None if status is None else STATES[status]
    async with services.pool.acquire() as connection:
        rows, total = await conversions.newest(
            connection, caller.tenant_id, user_id=user_id, states=states, before=before, limit=limit + 1
        )
    page = rows[:limit]
    more = cursor_of(page[-1]["job_id"]) if len(rows) > limit else None
    return {"jobs": [record(row) for row in page], "total": total, "next_cursor": more}
