"""The media door, second half: what became of a picture, by polling cheaply."""

from __future__ import annotations

from http import HTTPStatus
from time import time
from typing import Annotated
from uuid import UUID

import structlog
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from api.etags import matches, weak
from api.keyring import Caller
from api.media_view import is_finished, media_answer
from api.openapi import problems
from api.schemas import MediaAnswer
from api.security import MEDIA_READ, Require
from api.services import Services, services_of
from leasehold import reads
from leasehold.errors import NotFound
from leasehold.reads import MediaView

router = APIRouter(tags=["media"])
Reader = Annotated[Caller, Depends(Require(MEDIA_READ))]


@router.get(
    "/media/{media_id}",
    operation_id="getMedia",
    summary="See what became of a picture",
    response_model=MediaAnswer,
    response_model_exclude_none=True,
    responses=problems({
        HTTPStatus.NOT_FOUND: "`media_not_found`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`",
    }) | {304: {"description": "Nothing changed since the answer with the ETag in `If-None-Match`."}},
)  # fmt: skip
async def get_media(
    request: Request,
    response: Response,
    media_id: UUID,
    caller: Reader,
    if_none_match: Annotated[str | None, Header(max_length=1000)] = None,
    wait: Annotated[
        float, Query(ge=0, le=30, allow_inf_nan=False, description="Seconds to wait for a change, if unfinished.")
    ] = 0,
) -> MediaAnswer | Response:
    services = services_of(request)
    structlog.contextvars.bind_contextvars(media_id=str(media_id))
    found = await find_media(services, caller, media_id)
    if wait and _worth_waiting(services, found, if_none_match):
        assert found.job_id is not None
        await services.watch.changed(found.job_id, found.job_seq, wait)
        found = await find_media(services, caller, media_id)
    headers = {"ETag": _etag(services, found)}
    if not is_finished(found):
        headers["Retry-After"] = "1"
    if matches(if_none_match, headers["ETag"]):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    response.headers.update(headers)
    return await media_answer(services, found)


async def find_media(services: Services, caller: Caller, media_id: UUID) -> MediaView:
    """Raises NotFound; another tenant's media is not there."""
    found = await reads.find_media(services.engine, caller.tenant_id, media_id)
    if found is None:
        raise NotFound("media_not_found", "There is no such media.")
    return found


def _worth_waiting(services: Services, found: MediaView, if_none_match: str | None) -> bool:
    """Not when there is no job to change, nor when the caller does not know the present state yet."""
    if found.job_id is None or is_finished(found):
        return False
    return if_none_match is None or matches(if_none_match, _etag(services, found))


def _etag(services: Services, found: MediaView) -> str:
    """The state's version. Weak, because the signature in a URL differs from answer to answer.

    Where URLs are signed it changes twice in their life, so that a 304 never leaves a caller with a dead one.
    """
    version = f"{found.id}.{found.status}.{found.job_id}.{found.job_seq}"
    if is_finished(found) and services.settings.cdn_base_url is None:
        version += f".{int(time() // (services.settings.download_url_seconds / 2))}"
    return weak(version)
