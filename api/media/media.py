"""/media/{media_id}: reads the state of a picture, or deletes the picture. uploads.py registers a picture and starts
its job.
"""

from __future__ import annotations

from http import HTTPStatus
from time import time
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Header, Request, Response

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import MEDIA_READ, MEDIA_WRITE, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.etags import WaitSeconds, matches, may_be_current, weak_etag
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import publish_and_admit
from leasehold.api.media.schemas import MediaAnswer
from leasehold.api.media.view import is_finished, media_answer
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.domain.errors import NotFound, StoreError
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.limits import uploads
from leasehold.pipelines.media import reads, transitions
from leasehold.pipelines.media.reads import MediaView
from leasehold.transitions import concurrency

log = structlog.get_logger(__name__)

router = APIRouter(tags=["media"], route_class=AuthenticatedFirst)
Reader = Annotated[Caller, Depends(Require(MEDIA_READ))]
Writer = Annotated[Caller, Depends(Require(MEDIA_WRITE))]


@router.get(
    "/media/{media_id}",
    operation_id="getMedia",
    summary="Get the state and the results of a picture",
    response_model=MediaAnswer,
    response_model_exclude_none=True,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`media_not_found`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
    }) | {304: {"description": "Nothing has changed since the answer with the ETag in `If-None-Match`."}},
)  # fmt: skip
async def get_media(
    request: Request,
    response: Response,
    media_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: WaitSeconds = 0,
) -> MediaAnswer | Response:
    services = services_of(request)
    structlog.contextvars.bind_contextvars(media_id=str(media_id))
    media = await find_media(services, caller, media_id)
    # A long poll waits for a change of the job, and then reads the picture again.
    if wait and _should_wait(services, media, if_none_match):
        assert media.job_id is not None
        await services.watch.changed(media.job_id, media.job_seq, wait)
        media = await find_media(services, caller, media_id)
    headers = {"ETag": _etag(services, media)}
    if not is_finished(media):
        headers["Retry-After"] = "1"
    if matches(if_none_match, headers["ETag"]):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    response.headers.update(headers)
    return media_answer(services, media)


@router.delete(
    "/media/{media_id}",
    operation_id="deleteMedia",
    summary="Delete a picture and all its results",
    description="No request sees the picture any more; a running step is stopped. The objects are deleted in this "
    "call or, if the store is down or a step still runs, within minutes. A signed URL stops working when its object "
    "is deleted.",
    status_code=204,
    responses=problems({HTTPStatus.NOT_FOUND: "`media_not_found`"}),
)
async def delete_media(request: Request, media_id: UUID, caller: Writer) -> Response:
    services = services_of(request)
    structlog.contextvars.bind_contextvars(media_id=str(media_id))
    async with services.pool.acquire() as connection, connection.transaction():
        deletion = await transitions.delete(connection, media_id, caller.tenant_id, f"client {caller.client_id}")
        if deletion is None:
            raise NotFound("media_not_found", "There is no such media.")
        limit_names = await concurrency.limits_of(connection, [deletion.job_id]) if deletion.job_id else []
        await record(connection, caller, "media.deleted", media_id, job_id=deletion.job_id)
    count_ended_jobs(deletion.ended_jobs)
    if deletion.ended_jobs and deletion.job_id is not None:  # the ended job has left its limits, so admit other jobs
        await publish_and_admit(services, [], limit_names, [deletion.job_id])
    log.info("media deleted", job_id=str(deletion.job_id))
    try:
        await services.store.delete(deletion.original_key)
        if deletion.prefix is not None:  # None: a worker still writes the results, or there are none
            await uploads.remove_below(services.store, f"{deletion.prefix}/")
    except StoreError as error:  # housekeeping, a maintenance loop of the workers, deletes the objects later
        log.warning("objects of a deleted media are left for the housekeeping", error=type(error).__name__)
    return Response(status_code=HTTPStatus.NO_CONTENT)


async def find_media(services: Services, caller: Caller, media_id: UUID) -> MediaView:
    """Read the media. Raises NotFound, also for another tenant's media."""
    async with services.pool.acquire() as connection:
        media = await reads.find_media(connection, caller.tenant_id, media_id)
    if media is None:
        raise NotFound("media_not_found", "There is no such media.")
    return media


def _should_wait(services: Services, media: MediaView, if_none_match: str | None) -> bool:
    """Whether a long poll should wait, because the job is unfinished and the client may have the current state."""
    if media.job_id is None or is_finished(media):
        return False
    return may_be_current(if_none_match, _etag(services, media))


def _etag(services: Services, media: MediaView) -> str:
    """The ETag of the state. It is weak, because the signature in a URL differs from answer to answer.

    If the job has ended and there is no CDN, the answer may have signed URLs. Then the ETag also changes each time half
    the lifetime of a URL has passed, so that the client gets new URLs instead of a 304.
    """
    version = f"{media.id}.{media.status}.{media.job_id}.{media.job_seq}"
    if is_finished(media) and services.settings.cdn_base_url is None:
        version += f".{int(time() // (services.settings.download_url_seconds / 2))}"
    return weak_etag(version)
