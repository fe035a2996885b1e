"""Uploads an object whose bytes come piece by piece and whose size is not known in advance.

The API uses this module to pass the body of a request on to the store. At most two parts are in memory, because while
one part is sent, the next part is filled.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog

from leasehold.domain.errors import ObjectMissing, StoreError
from leasehold.domain.ids import new_id
from leasehold.runtime.gather import cancel_and_wait
from leasehold.storage.s3 import PutRefused, request, with_lower_names

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef

log = structlog.get_logger(__name__)

#: The size of a part: the smallest size that S3 allows, because parts are held in memory. S3 allows 10,000 parts, so an
#: object has at most about 52 GB.
PART_BYTES = 5 * 1024 * 1024
#: The metadata field of an object with the id of the `Upload` that wrote it.
_WRITER_FIELD = "upload"


@dataclass(frozen=True, slots=True)
class Written:
    """What an upload has stored."""

    size: int
    sha256: str


class Upload:
    """One upload. Use it as `async with store.upload(key) as upload`. In this block call `write` for each piece, and
    then `finish`. Without `finish` nothing is stored. `write` and `finish` raise StoreErrors.

    `attributes`: the content type and the metadata, as botocore's parameters. `timeout_for(size)`: the timeout of a
    request that sends `size` bytes. `only_new`: store the object only if the key has no object yet.
    """

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        key: str,
        attributes: dict[str, Any],
        timeout_for: Callable[[int], asyncio.Timeout],
        *,
        only_new: bool = False,
    ) -> None:
        self._client = client
        self._target: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self._writer_id = str(new_id())
        metadata = attributes["Metadata"] | {_WRITER_FIELD: self._writer_id}
        self._attributes = attributes | {"Metadata": metadata}  # the content type and the metadata
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_new else {}
        self._timeout_for = timeout_for
        self._upload_id: str | None = None  # of the multipart upload; None: the object is still smaller than a part
        self._part = bytearray()  # the part that is being filled
        self._parts: list[CompletedPartTypeDef] = []  # the parts that have been sent
        self._sending: asyncio.Task[None] | None = None  # sends a full part in the background
        self._digest = hashlib.sha256()
        self._finished = False
        self.key = key
        self.size = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if not self._finished:
            await asyncio.shield(self._abort())

    async def write(self, piece: bytes) -> None:
        """Add bytes. A full part is sent in the background."""
        self.size += len(piece)
        self._part += piece
        if len(self._part) >= PART_BYTES:
            await self._start_part()

    async def finish(self) -> Written:
        """Store the written bytes as the object. An object that is smaller than a part is stored in one request."""
        if self._upload_id is None:
            body = self._take_part()
            self._digest.update(body)
            storing = self._put(body)
        else:
            if self._part:
                await self._start_part()
            await self._wait_for_part()
            storing = self._complete()
        try:
            await storing
        except (PutRefused, ObjectMissing):
            # botocore repeats a request if its answer was an error or was lost. If the first request has stored the
            # object, the store refuses the second request, because the object exists already, or because the multipart
            # upload is over.
            if not await self._is_stored():
                raise
        self._finished = True
        return Written(self.size, self._digest.hexdigest())

    def _take_part(self) -> bytes:
        body = bytes(self._part)
        self._part.clear()
        return body

    async def _start_part(self) -> None:
        await self._wait_for_part()  # the previous part, because only one part is sent at a time
        if self._upload_id is None:  # this is the first part
            with request("put", self.key):
                async with self._timeout_for(0):
                    upload_started = await self._client.create_multipart_upload(**self._target, **self._attributes)
            self._upload_id = upload_started["UploadId"]
        self._sending = asyncio.create_task(self._send_part(len(self._parts) + 1, self._take_part()))

    async def _wait_for_part(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending

    async def _send_part(self, number: int, body: bytes) -> None:
        await asyncio.to_thread(self._digest.update, body)
        with request("put", self.key):
            async with self._timeout_for(len(body)):
                answer = await self._client.upload_part(**self._upload_target(), PartNumber=number, Body=body)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"]})

    async def _put(self, body: bytes) -> None:
        with request("put", self.key):
            async with self._timeout_for(len(body)):
                await self._client.put_object(**self._target, Body=body, **self._attributes, **self._condition)

    async def _complete(self) -> None:
        with request("put", self.key):
            async with self._timeout_for(self.size):
                await self._client.complete_multipart_upload(
                    **self._upload_target(), MultipartUpload={"Parts": self._parts}, **self._condition
                )

    async def _is_stored(self) -> bool:
        """Whether this upload wrote the object that the key has now. If the store keeps no metadata, the result is
        False.
        """
        try:
            with request("head", self.key):
                async with self._timeout_for(0):
                    answer = await self._client.head_object(**self._target)
        except ObjectMissing:
            return False
        return with_lower_names(answer.get("Metadata", {})).get(_WRITER_FIELD) == self._writer_id

    async def _abort(self) -> None:
        # Stop the part that is being sent, and end the multipart upload, so that the store deletes the parts.
        if self._sending is not None:
            await cancel_and_wait(self._sending)
        if self._upload_id is None:
            return
        try:
            with request("put", self.key):
                async with self._timeout_for(0):
                    await self._client.abort_multipart_upload(**self._upload_target())
        except ObjectMissing:  # an earlier request has aborted the upload, or completed it
            return
        except StoreError as error:  # only log it, because the caller must get the error that ended its block
            log.warning("parts of an upload are left in the store", key=self.key, error=type(error).__name__)

    def _upload_target(self) -> dict[str, Any]:
        return self._target | {"UploadId": self._upload_id}
