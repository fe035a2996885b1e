"""An object whose bytes come piece by piece, its size not known before: at most two parts are in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import structlog

from leasehold.domain.errors import StoreError
from leasehold.storage.s3 import asked

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import CompletedPartTypeDef

log = structlog.get_logger(__name__)

#: The least that S3 allows: a part is in memory while it gathers, and while it is sent. 10,000 of them are 52 GB.
PART_BYTES = 5 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Written:
    size: int
    sha256: str


class Upload:
    """`async with store.upload(key) as upload`: write, then `finish`. Left without `finish`, nothing is stored.

    Raises StoreUnavailable. One part is on its way while the next one gathers.
    """

    def __init__(
        self,
        client: S3Client,
        bucket: str,
        key: str,
        how: dict[str, Any],
        limit: Callable[[int], asyncio.Timeout],
        *,
        only_new: bool = False,
    ) -> None:
        self._client = client
        self._named: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self._how = how  # content type and metadata
        self._condition: dict[str, Any] = {"IfNoneMatch": "*"} if only_new else {}
        self._limit = limit
        self._upload_id: str | None = None
        self._gathered = bytearray()
        self._parts: list[CompletedPartTypeDef] = []
        self._sending: asyncio.Task[None] | None = None
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
        self.size += len(piece)
        self._gathered += piece
        if len(self._gathered) >= PART_BYTES:
            await self._send()

    async def finish(self) -> Written:
        """Store what was written. Small objects go in one request."""
        if self._upload_id is None:
            body = self._taken()
            self._digest.update(body)
            with asked("put", self.key):
                async with self._limit(len(body)):
                    await self._client.put_object(**self._named, Body=body, **self._how, **self._condition)
        else:
            if self._gathered:
                await self._send()
            await self._sent()
            await self._complete()
        self._finished = True
        return Written(self.size, self._digest.hexdigest())

    def _taken(self) -> bytes:
        body = bytes(self._gathered)
        self._gathered.clear()
        return body

    async def _send(self) -> None:
        await self._sent()
        if self._upload_id is None:
            with asked("put", self.key):
                async with self._limit(0):
                    made = await self._client.create_multipart_upload(**self._named, **self._how)
            self._upload_id = made["UploadId"]
        self._sending = asyncio.create_task(self._part(len(self._parts) + 1, self._taken()))

    async def _sent(self) -> None:
        if self._sending is not None:
            sending, self._sending = self._sending, None
            await sending

    async def _part(self, number: int, body: bytes) -> None:
        await asyncio.to_thread(self._digest.update, body)
        with asked("put", self.key):
            async with self._limit(len(body)):
                said = await self._client.upload_part(**self._upload(), PartNumber=number, Body=body)
        self._parts.append({"PartNumber": number, "ETag": said["ETag"]})

    async def _complete(self) -> None:
        with asked("put", self.key):
            async with self._limit(self.size):
                await self._client.complete_multipart_upload(
                    **self._upload(), MultipartUpload={"Parts": self._parts}, **self._condition
                )

    async def _abort(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.gather(self._sending, return_exceptions=True)
        if self._upload_id is None:
            return
        try:
            with asked("put", self.key):
                async with self._limit(0):
                    await self._client.abort_multipart_upload(**self._upload())
        except StoreError as error:  # whatever made the caller leave is what they must hear of
            log.warning("parts of an upload are left in the store", key=self.key, error=type(error).__name__)

    def _upload(self) -> dict[str, Any]:
        return self._named | {"UploadId": self._upload_id}
