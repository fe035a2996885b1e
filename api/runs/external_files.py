"""POST /v1/external/tasks/{task_id}/files: signs URLs to which an external worker uploads the files of a step. The
worker then names the files in `complete`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, TypeAlias
from uuid import UUID

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.process.services import services_of
from leasehold.api.runs.external import FileName, Held, Worker, in_time, lease_lost, lease_of
from leasehold.domain.json_values import Integer
from leasehold.limits.external_files import AnnouncedFile, announce
from leasehold.runtime.pacing import paced

router = APIRouter(tags=["external workers"], prefix="/v1/external", route_class=AuthenticatedFirst)

#: The largest file that any installation accepts, because S3 takes at most 5 GiB in one PUT.
MAX_BYTES = 5 * 1024**3
ContentType: TypeAlias = Annotated[
    str, Field(pattern=r"^[a-z0-9][a-z0-9!#$&^_.+-]{0,62}/[a-z0-9][a-z0-9!#$&^_.+-]{0,62}$")
]


class NewFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: FileName
    size: Integer = Field(ge=1, le=MAX_BYTES, description="The file's size in bytes: the store accepts no other size.")
    content_type: ContentType = "application/octet-stream"


# The fields of `Held` name the lease: the worker's id and the epoch.
class NewFiles(Held):
    files: list[NewFile] = Field(min_length=1, max_length=1000)


class FileTicket(BaseModel):
    """PUT the bytes to `url` with these `headers`, and with no other Content-Type."""

    name: str
    url: str
    headers: dict[str, str]
    expires_in: int


class FileTickets(BaseModel):
    files: list[FileTicket]


@router.post(
    "/tasks/{task_id}/files",
    operation_id="announceExternalFiles",
    summary="Get signed URLs for the files of a step",
    description="Each URL accepts exactly the announced number of bytes and, if the store can refuse to overwrite, "
    "only once. Name the uploaded files in `complete`: files that it does not name are deleted. A name that is "
    "announced again gets a new URL.",
    response_model=FileTickets,
    responses=problems({
        HTTPStatus.CONFLICT: "`lease_lost`: another worker holds the task, its time limit has passed, or it has ended",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `too_many_files`, `files_too_large`, `file_mismatch`",
        HTTPStatus.TOO_MANY_REQUESTS: "`upload_quota_exceeded`, `storage_full`",
        HTTPStatus.SERVICE_UNAVAILABLE: "`store_not_configured`, `database_unavailable`",
    }),
)  # fmt: skip
async def announce_files(request: Request, task_id: UUID, body: NewFiles, caller: Worker) -> FileTickets:
    services = services_of(request)
    services.store.require()
    # With this header, the store accepts only the first PUT to a key. Some stores do not support the header, so
    # `probe_once` tries it at the store.
    write_once = {"If-None-Match": "*"} if await services.store.probe_once() else {}
    settings = services.settings
    lease = lease_of(caller, task_id, body)
    files = [AnnouncedFile(file.name, file.size, file.content_type) for file in body.files]
    object_keys: list[str] | None = None  # stays None if the lease is lost, or if the step is past its time limit
    # `in_time` locks the job for the block. If the step is past its time limit, `in_time` ends the attempt, and yields
    # False.
    async with services.pool.acquire() as connection, in_time(services, connection, caller, lease) as is_in_time:
        if is_in_time:
            await services.admission.check_stored_bytes(connection, caller.tenant_id, sum(file.size for file in files))
            room = services.admission.upload_room
            object_keys = await announce(connection, settings, room, caller.tenant_id, lease, files)
    if object_keys is None:
        raise lease_lost()
    return FileTickets(
        files=[
            FileTicket(
                name=file.name,
                url=services.store.sign_put(
                    object_key,
                    content_type=file.content_type,
                    seconds=settings.upload_url_seconds,
                    content_length=file.size,
                    only_new=True,
                ),
                headers={"Content-Type": file.content_type} | write_once,
                expires_in=settings.upload_url_seconds,
            )
            async for file, object_key in paced(list(zip(files, object_keys, strict=True)))
        ]
    )
