"""POST /upload-url signs an upload URL. POST /complete-upload checks the uploaded picture and starts its job."""

from __future__ import annotations

from datetime import timedelta
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Request, Response

from leasehold.api.auth.security import MEDIA_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.callback_urls import REFUSED_URL, check_callback_url
from leasehold.api.http.early import refuse_early
from leasehold.api.http.edge import identity_of
from leasehold.api.http.file_names import clean_file_name
from leasehold.api.http.idempotent import Answer, IdempotencyKey, once
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.media.inspection import Refusal, inspect_upload
from leasehold.api.media.media import find_media
from leasehold.api.media.schemas import Accepted, CompleteRequest, UploadRequest, UploadTicket
from leasehold.api.process.keyring import Caller
from leasehold.api.process.metrics import SUBMITTED, UPLOADS_REFUSED
from leasehold.api.process.services import Services, services_of
from leasehold.broker.base import BANDS
from leasehold.db.database import Connection
from leasehold.db.idempotency import fingerprint
from leasehold.domain.errors import Conflict, Invalid, StoreError
from leasehold.domain.ids import new_id
from leasehold.limits import uploads
from leasehold.limits.admission import queues_of
from leasehold.pipelines.media import transitions
from leasehold.pipelines.media.kinds import ALLOWED, HEIC
from leasehold.pipelines.media.limits import PictureLimits
from leasehold.pipelines.media.pipeline import MediaParams, media
from leasehold.pipelines.media.reads import MediaView
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

log = structlog.get_logger(__name__)
router = APIRouter(tags=["media"], route_class=AuthenticatedFirst)
#: The caller of an endpoint. The caller's API key must have this scope.
Writer = Annotated[Caller, Depends(Require(MEDIA_WRITE))]


@router.post(
    "/upload-url",
    operation_id="createUploadUrl",
    summary="Get a URL to upload a picture to",
    status_code=201,
    response_model=UploadTicket,
    responses=problems({
        HTTPStatus.CONFLICT: "`idempotency_key_in_flight`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`unsupported_content_type`, `too_large`, `content_length_required`, "
        "`invalid_request`, `idempotency_key_reused`, `idempotency_key_malformed`",
        HTTPStatus.TOO_MANY_REQUESTS: "`rate_limited`, `storage_full`, `upload_quota_exceeded`",
    }),
)  # fmt: skip
async def create_upload_url(
    request: Request, upload: UploadRequest, caller: Writer, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    services.store.require()
    _check_request(upload, services.settings)
    rate_limit_headers: dict[str, str] = {}

    async def work(connection: Connection) -> Answer:
        rate_limit_headers.update(await services.admission.charge_upload(connection, caller.payer))
        return await _register_upload(services, connection, caller, upload)

    request_hash = fingerprint(b"POST /upload-url", upload.model_dump_json().encode())
    answer = await once(services.pool, caller.tenant_id, idempotency_key, request_hash, work)
    ticket = UploadTicket.model_validate_json(answer.body)
    if answer.age.total_seconds() > ticket.expires_in / 2 and await _extend_upload(services, caller, ticket, upload):
        # This request repeats an earlier request, and more than half of the first URL's lifetime has passed. So the
        # same media gets a new URL. A repetition that comes sooner gets the first answer unchanged. A repetition after
        # the end of the upload also gets the first answer, although the first URL may not work any more.
        ticket = _make_ticket(services, ticket.media_id, ticket.original_key, upload)
    headers = rate_limit_headers | {"Location": f"/media/{ticket.media_id}"}
    return Response(ticket.model_dump_json(), answer.status_code, headers, media_type="application/json")


async def _extend_upload(services: Services, caller: Caller, ticket: UploadTicket, upload: UploadRequest) -> bool:
    """Let the client upload for `upload_url_seconds` from now. Returns False if the client gets no new URL, because the
    upload has ended, or because the media expires within this time. Raises TooMany `upload_quota_exceeded`.
    """
    tenant_id, key = caller.tenant_id, ticket.original_key
    async with services.pool.acquire() as connection, connection.transaction():
        if not await transitions.extend_upload(connection, tenant_id, key, services.settings.upload_url_seconds):
            return False
        await uploads.count_again(
            connection,
            services.settings,
            tenant_id,
            key,
            _counted_bytes(services.settings, upload),
            services.admission.upload_room,
        )
    return True


def _counted_bytes(settings: Settings, upload: UploadRequest) -> int:
    """How many bytes count for an unfinished upload: the number that the client declared, or else the largest allowed
    size.
    """
    return upload.content_length or settings.picture_max_bytes


def _check_request(upload: UploadRequest, settings: Settings) -> None:
    accepted_types = ALLOWED.keys() if settings.picture_heic else ALLOWED.keys() - HEIC
    if upload.content_type not in accepted_types:
        raise Invalid("unsupported_content_type", f"Accepted types: {', '.join(sorted(accepted_types))}.")
    if upload.content_length is None and settings.upload_require_length:
        raise Invalid("content_length_required", "Send content_length: the upload URL admits exactly this many bytes.")
    if upload.content_length is not None and upload.content_length > settings.picture_max_bytes:
        raise Invalid("too_large", f"A picture has at most {settings.picture_max_bytes} bytes.")


async def _register_upload(services: Services, connection: Connection, caller: Caller, upload: UploadRequest) -> Answer:
    media_id = new_id()
    key = f"media/{media_id}/original.{ALLOWED[upload.content_type]}"
    at_most = services.settings.picture_max_bytes
    await uploads.open_upload(
        connection,
        services.settings,
        caller.tenant_id,
        key,
        counted_bytes=_counted_bytes(services.settings, upload),
        at_most=at_most,
        seconds=services.settings.upload_url_seconds,
        room=services.admission.upload_room,
        exact=upload.content_length is not None,  # the URL admits exactly `counted_bytes`
    )
    await transitions.register(
        connection,
        media_id,
        caller.tenant_id,
        original_key=key,
        content_type=upload.content_type,
        file_name=clean_file_name(upload.file_name),
        lifetime=timedelta(seconds=services.settings.upload_unfinished_seconds),
    )
    log.info("upload registered", media_id=str(media_id))
    ticket = _make_ticket(services, media_id, key, upload)
    return Answer(HTTPStatus.CREATED, ticket.model_dump_json().encode())


def _make_ticket(services: Services, media_id: UUID, key: str, upload: UploadRequest) -> UploadTicket:
    seconds = services.settings.upload_url_seconds
    url = services.store.sign_put(
        key, content_type=upload.content_type, seconds=seconds, content_length=upload.content_length
    )
    return UploadTicket(media_id=media_id, upload_url=url, original_key=key, expires_in=seconds)


@router.post(
    "/complete-upload",
    operation_id="completeUpload",
    summary="Start the processing of an uploaded picture",
    description="A repeated call, also a concurrent one, gets the same answer and starts nothing twice. If calls "
    "differ in `variants` or `priority`, the first counts. A refused object makes the media FAILED: get a new "
    "upload URL to try again.",
    status_code=202,
    response_model=Accepted,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`media_not_found`",
        HTTPStatus.CONFLICT: "`upload_missing`, `upload_expired`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`wrong_key`, `invalid_request`; and, for the object itself, "
        f"`empty_file`, `too_large`, `unsupported_format`, `mislabelled`; of `callback_url` {REFUSED_URL}",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }),
)  # fmt: skip
async def complete_upload(request: Request, response: Response, body: CompleteRequest, caller: Writer) -> Accepted:
    services = services_of(request)
    structlog.contextvars.bind_contextvars(media_id=str(body.media_id))
    picture = await find_media(services, caller, body.media_id)
    if body.original_key != picture.original_key:
        raise Invalid("wrong_key", "The original_key is not the key of this media.")
    job_id = _job_id_of(picture)
    if job_id is None:
        trace = identity_of(request).trace
        job_id, rate_limit_headers = await _check_and_submit(services, caller, picture, body, trace)
        response.headers.update(rate_limit_headers)
    response.headers["Location"] = f"/media/{picture.id}"
    response.headers["Retry-After"] = "1"
    return Accepted(media_id=picture.id, job_id=job_id)


def _job_id_of(picture: MediaView) -> UUID | None:
    """The id of the picture's job, or None if the picture has no job yet. Raises Invalid if the picture is refused
    already.
    """
    if picture.error is not None:
        raise Invalid(picture.error["code"], picture.error["message"])
    return picture.job_id


async def _check_and_submit(
    services: Services, caller: Caller, picture: MediaView, body: CompleteRequest, trace: dict[str, str]
) -> tuple[UUID, dict[str, str]]:
    """Check the object and write the job. Returns the job's id and the RateLimit headers. If another request has
    written the job first, returns that job's id and no headers.
    """
    check_callback_url(services.settings, body.callback_url)
    await refuse_early(services, caller, queues_of(caller.tenant_id, media))
    limits = _picture_limits(services.settings)
    try:
        size_or_refusal = await inspect_upload(services.store, picture.original_key, picture.content_type, limits)
    except Conflict:
        # The store has no object. Another request may have refused and deleted the object meanwhile. In that case
        # `_job_id_of` raises the error of this refusal.
        if (job_id := _job_id_of(await find_media(services, caller, picture.id))) is not None:
            return job_id, {}
        raise
    if isinstance(size_or_refusal, Refusal):
        return await _refuse(services, caller, picture, size_or_refusal), {}
    size = size_or_refusal
    job = _new_job(services.settings, caller, picture, body, trace)
    submitted, rate_limit_headers = await _write_job(services, caller, picture, job, size)
    if submitted is None:
        return await _outcome_of_other_request(services, caller, picture.id), {}
    await publish_and_admit(services, submitted.hints, submitted.limits)
    SUBMITTED.labels(media.name).inc()
    log.info("job submitted", job_id=str(job.id), bytes=size)
    return job.id, rate_limit_headers


def _new_job(
    settings: Settings, caller: Caller, picture: MediaView, body: CompleteRequest, trace: dict[str, str]
) -> NewJob:
    params = MediaParams(
        variants=tuple(body.variants), content_type=picture.content_type, limits=_picture_limits(settings)
    )
    return NewJob(
        pipeline=media,
        tenant_id=caller.tenant_id,
        params=params.model_dump(mode="json"),
        inputs={"original": picture.original_key},
        output_prefix=f"media/{picture.id}",
        priority=BANDS.index(body.priority),  # BANDS: the priorities, the most urgent first
        step_priority={step: BANDS.index(priority) for step, priority in body.step_priority.items()},
        keep_seconds=_keep_seconds(settings),
        trace=trace | {"media_id": str(picture.id)},
        tags=body.tags,
        callback_url=body.callback_url,
    )


async def _write_job(
    services: Services, caller: Caller, picture: MediaView, job: NewJob, size: int
) -> tuple[Submitted | None, dict[str, str]]:
    """Write the job of a picture of `size` bytes, and charge the caller, in one transaction. Also returns the RateLimit
    headers.

    If another request has started a job or refused the picture first, this returns None in place of the job, and does
    not charge the caller.
    """
    queues = queues_of(caller.tenant_id, media)
    async with (
        services.pool.acquire() as connection,
        connection.transaction(),
        services.admission.submitting(connection, caller.payer, queues, size=size) as charge,
    ):
        submitted = await transitions.complete_upload(connection, picture.id, caller.tenant_id, size, job)
        if submitted is None:
            await services.admission.refund(connection, caller.payer)
        else:
            # The tenant's stored bytes count `size`. If the client later uploads a larger object with the same URL,
            # housekeeping (a maintenance loop of the workers) deletes the object.
            await uploads.close(connection, caller.tenant_id, picture.original_key, keep=size)
    return submitted, charge.fields


async def _refuse(services: Services, caller: Caller, picture: MediaView, refusal: Refusal) -> UUID:
    """Record the picture as FAILED, and raise Invalid with the reason. If another request has started a job first,
    return the id of that job. If another request has refused the picture first, raise Invalid with the reason of that
    refusal.
    """
    async with services.pool.acquire() as connection, connection.transaction():
        is_recorded = await transitions.refuse_upload(
            connection,
            picture.id,
            caller.tenant_id,
            error={"code": refusal.code, "message": refusal.message, "retryable": False},
            keep=timedelta(days=services.settings.retention_days),
        )
        if is_recorded:  # `keep=None`: no object may stay
            await uploads.close(connection, caller.tenant_id, picture.original_key, keep=None)
    if not is_recorded:
        return await _outcome_of_other_request(services, caller, picture.id)
    try:
        await services.store.delete(picture.original_key)
    except StoreError as error:  # housekeeping deletes the object within a minute
        log.warning("a refused object is left for the housekeeping", error=type(error).__name__)
    UPLOADS_REFUSED.labels(refusal.code).inc()
    log.info("upload refused", code=refusal.code, bytes=refusal.size)
    raise Invalid(refusal.code, refusal.message)


async def _outcome_of_other_request(services: Services, caller: Caller, media_id: UUID) -> UUID:
    """The id of the job that another request has started. Raises Invalid if the other request has refused the picture.
    Raises Conflict if there was no other request, which means that the upload has expired.
    """
    job_id = _job_id_of(await find_media(services, caller, media_id))
    if job_id is None:
        raise Conflict("upload_expired", "The upload was not completed in time: get a new upload URL.")
    return job_id


def _keep_seconds(settings: Settings) -> int | None:
    days = settings.media_retention_days
    return None if days is None else days * 24 * 3600


def _picture_limits(settings: Settings) -> PictureLimits:
    return PictureLimits(
        max_bytes=settings.picture_max_bytes,
        max_pixels=settings.picture_max_pixels,
        max_total_pixels=settings.picture_max_total_pixels,
        max_frames=settings.picture_max_frames,
    )
