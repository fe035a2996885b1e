"""The one object store: any S3 service. Puts are create-only, reads are checked, memory stays flat.

A key that exists is not overwritten: equal bytes are success (another attempt stored them), other bytes are the
leftover of a dead attempt and are replaced only while the caller's lease is trusted. Stores that do not honour
`If-None-Match` are found out by `probe`; there a HEAD comes first, and reproducible bytes carry the promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from leasehold.domain.errors import (
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreAbsent,
    StoreUnavailable,
)
from leasehold.domain.ids import id_at, new_id
from leasehold.settings import Settings
from leasehold.storage.content import CHUNK, digest_of, digest_of_bytes
from leasehold.storage.multipart import put_in_parts
from leasehold.storage.s3 import PutRefused, asked, nothing_in_range, open_client
from leasehold.storage.streaming import Upload

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import GetObjectOutputTypeDef


#: Larger files go up in parts.
SINGLE_PUT_BYTES = 64 * 1024 * 1024
#: What the slowest link we put up with moves in a second: lengthens the time limit of large transfers.
_SLOWEST_BYTES_PER_SECOND = 1024 * 1024
_UNKNOWN_TYPE = "application/octet-stream"
_PROBES = "probe/"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object as the store has it. `sha256` is "" when the store does not remember it."""

    key: str
    size: int
    sha256: str
    content_type: str
    etag: str | None
    metadata: Mapping[str, str]


def _never(_there: Stored) -> bool:
    return False


def _ignored(_answer: GetObjectOutputTypeDef) -> None:
    return


def _lower(metadata: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in metadata.items()}


ABSENT = "This installation has no object store: LEASEHOLD_OBJECT_STORE is none."


class ObjectStore:
    """Opened once a process. Raises StoreUnavailable for whatever may pass, and never a botocore error."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bucket = settings.s3_bucket
        self._opened = AsyncExitStack()
        self._client: S3Client
        self._signer: S3Client
        self.conditional = settings.s3_conditional_puts == "yes"
        self._asked = settings.s3_conditional_puts != "probe"
        self._asking = asyncio.Lock()

    @classmethod
    def from_settings(cls, settings: Settings) -> ObjectStore:
        return cls(settings)

    async def open(self) -> None:
        settings = self._settings
        if self.is_absent:
            self._client = self._signer = cast("S3Client", _Absent())
            return
        self._client = await self._opened.enter_async_context(open_client(settings, settings.s3_endpoint))
        self._signer = self._client
        if settings.s3_public_endpoint is not None:
            self._signer = await self._opened.enter_async_context(open_client(settings, settings.s3_public_endpoint))

    @property
    def is_absent(self) -> bool:
        """There is none, and somebody said so: reading and writing raise StoreAbsent; there is nothing to delete."""
        return self._settings.object_store == "none"

    def require(self) -> None:
        """Raises StoreAbsent: before anything is accepted that could not be done without."""
        if self.is_absent:
            raise StoreAbsent(ABSENT)

    async def close(self) -> None:
        await self._opened.aclose()

    async def ensure_bucket(self) -> None:
        """Make the bucket if it is not there."""
        if self.is_absent:
            return
        with asked("bucket", self._bucket):
            async with self._limit(0):
                try:
                    await self._client.head_bucket(Bucket=self._bucket)
                except self._client.exceptions.ClientError:
                    with contextlib.suppress(
                        self._client.exceptions.BucketAlreadyOwnedByYou, self._client.exceptions.BucketAlreadyExists
                    ):
                        await self._client.create_bucket(Bucket=self._bucket)

    async def probe(self) -> bool:
        """Whether the store refuses to overwrite when told so; remembered in `conditional`."""
        if self.is_absent or self._settings.s3_conditional_puts != "probe":
            return self.conditional
        key = f"{_PROBES}{new_id()}"
        try:
            await self._put_once(key, b"1", "text/plain", {}, IfNoneMatch="*")
            await self._put_once(key, b"2", "text/plain", {}, IfNoneMatch="*")
        except PutRefused:
            self.conditional = True
        else:
            self.conditional = False
        finally:
            await self.delete(key)
        self._asked = True
        return self.conditional

    async def can_refuse(self) -> bool:
        """As `probe`, which is asked once: for processes that do not probe when they start."""
        async with self._asking:
            return self.conditional if self._asked else await self.probe()

    async def forget_probes(self, older_than: timedelta) -> None:
        """Delete what processes that died while they probed have left."""
        newest = f"{_PROBES}{id_at(datetime.now(UTC) - older_than)}"
        await self.delete(*[found.key async for found in self.list(_PROBES) if found.key < newest])

    # --- writing

    async def put(
        self,
        key: str,
        source: bytes | Path,
        *,
        content_type: str,
        metadata: Mapping[str, str],
        may_replace: Callable[[Stored], bool] = _never,
        fresh: bool = False,
    ) -> Stored:
        """Store bytes, or a file. Raises ObjectExists when other bytes lie there that `may_replace` does not give up.

        `fresh`: nobody can have written the key before. Saves a look where the store cannot refuse by itself.
        """
        if isinstance(source, Path):
            source, sha256, size = await asyncio.to_thread(_looked_through, source)
        else:
            sha256, size = await asyncio.to_thread(digest_of_bytes, source), len(source)
        said = {**metadata, "sha256": sha256}
        put = self._put_in_parts if isinstance(source, Path) else self._put_once
        precondition: dict[str, Any] = {"IfNoneMatch": "*"} if self.conditional else {}
        there = None if self.conditional or fresh else await self.head(key)
        for _ in range(4):  # each turn lost means that another writer won one
            if there is not None:
                if await self._same(there, sha256, size):
                    return there
                if not may_replace(there):
                    raise ObjectExists(key)
                precondition = {"IfMatch": there.etag} if self.conditional and there.etag else {}
            try:
                etag = await put(key, source, content_type, said, **precondition)  # type: ignore[arg-type]  # bytes or Path, as chosen above
            except (PutRefused, ObjectMissing):
                there = await self.head(key)
                precondition = {"IfNoneMatch": "*"}
                continue
            return Stored(key, size, sha256, content_type, etag, said)
        raise StoreUnavailable(f"{key}: others keep writing it")

    def upload(
        self,
        key: str,
        *,
        content_type: str = _UNKNOWN_TYPE,
        metadata: Mapping[str, str] | None = None,
        only_new: bool = False,
    ) -> Upload:
        """An object to be written piece by piece under a key that nobody else writes.

        `only_new`: where the store can refuse to overwrite, `finish` raises PutRefused if something lies there.
        """
        how = {"ContentType": content_type, "Metadata": dict(metadata or {})}
        return Upload(self._client, self._bucket, key, how, self._limit, only_new=only_new)

    async def _put_once(
        self, key: str, data: bytes, content_type: str, metadata: Mapping[str, str], **precondition: Any
    ) -> str | None:
        with asked("put", key):
            async with self._limit(len(data)):
                said = await self._client.put_object(
                    Bucket=self._bucket,
                    Key=key,
                    Body=data,
                    ContentType=content_type,
                    Metadata=dict(metadata),
                    **precondition,
                )
        return said.get("ETag")

    async def _put_in_parts(
        self, key: str, path: Path, content_type: str, metadata: Mapping[str, str], **precondition: Any
    ) -> str | None:
        size = (await asyncio.to_thread(path.stat)).st_size
        with asked("put", key):
            async with self._limit(size):
                return await put_in_parts(
                    self._client, self._bucket, key, path, size, content_type, metadata, **precondition
                )

    async def _same(self, there: Stored, sha256: str, size: int) -> bool:
        if there.size != size:
            return False
        if there.sha256:
            return there.sha256 == sha256
        # The store forgot its metadata: only the bytes can tell.
        digest = hashlib.sha256()
        async with aclosing(self._pieces(there.key)) as pieces:
            async for piece in pieces:
                digest.update(piece)
        return digest.hexdigest() == sha256

    # --- reading

    async def head(self, key: str) -> Stored | None:
        """What the store says of the object; None when there is none."""
        try:
            with asked("head", key):
                async with self._limit(0):
                    said = await self._client.head_object(Bucket=self._bucket, Key=key)
        except ObjectMissing:
            return None
        metadata = _lower(said.get("Metadata", {}))
        return Stored(
            key,
            said["ContentLength"],
            metadata.get("sha256", ""),
            said.get("ContentType", _UNKNOWN_TYPE),
            said.get("ETag"),
            metadata,
        )

    async def read_head(self, key: str, count: int) -> bytes:
        """The first `count` bytes, or all of a shorter object. Raises ObjectMissing."""
        return (await self.look(key, count))[1]

    async def look(self, key: str, count: int) -> tuple[int, bytes]:
        """The object's size and its first `count` bytes, in one request. Raises ObjectMissing."""
        said: list[GetObjectOutputTypeDef] = []
        taken = bytearray()
        async with aclosing(self._pieces(key, said.append, first=count)) as pieces:
            async for piece in pieces:
                taken += piece
                if len(taken) >= count:  # a store that knows no ranges sends all of it
                    break
        return _size_of(said[0]) if said else 0, bytes(taken[:count])  # an empty object has no range to answer with

    async def fetch_file(
        self, key: str, path: Path, *, sha256: str | None = None, max_bytes: int | None = None
    ) -> Stored:
        """Download to `path` in pieces and return the true size and sha256.

        Raises ObjectMissing; ObjectCorrupt when the bytes are not those of `sha256`; ObjectTooLarge when there are
        more than `max_bytes`. No partial file is left.
        """
        for last in (False, False, True):  # a transfer cut in the middle begins again
            try:
                got = await self._download(key, path, max_bytes)
                break
            except StoreUnavailable:
                if last:
                    raise
        if sha256 is not None and got.sha256 != sha256:
            await _remove(path)
            raise ObjectCorrupt(f"{key}: its bytes are not those that were stored")
        return got

    async def _download(self, key: str, path: Path, max_bytes: int | None) -> Stored:
        answered: list[GetObjectOutputTypeDef] = []
        digest, size, whole = hashlib.sha256(), 0, False
        file = await asyncio.to_thread(path.open, "wb")
        try:
            async with aclosing(self._pieces(key, answered.append)) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    if max_bytes is not None and max(size, answered[0]["ContentLength"]) > max_bytes:
                        raise ObjectTooLarge(f"{key}: it has more than the {max_bytes} bytes allowed")
                    await asyncio.to_thread(_take, file, digest, piece)
            whole = True
        finally:
            file.close()
            if not whole:
                await _remove(path)
        return _stored(key, size, digest.hexdigest(), answered[0])

    async def fetch_bytes(self, key: str, *, sha256: str | None = None, max_bytes: int) -> bytes:
        """A small object, whole. Raises as `fetch_file`."""
        data = await self.read_head(key, max_bytes + 1)
        if len(data) > max_bytes:
            raise ObjectTooLarge(f"{key}: it has more than the {max_bytes} bytes allowed")
        if sha256 is not None and digest_of_bytes(data) != sha256:
            raise ObjectCorrupt(f"{key}: its bytes are not those that were stored")
        return data

    async def digest(self, key: str, *, max_bytes: int) -> Stored:
        """The true size and sha256 of an object, all of whose bytes are read and none kept.

        Raises ObjectMissing, and ObjectTooLarge when there are more than `max_bytes`.
        """
        answered: list[GetObjectOutputTypeDef] = []
        digest, size = hashlib.sha256(), 0
        async with aclosing(self._pieces(key, answered.append)) as pieces:
            async for piece in pieces:
                size += len(piece)
                if max(size, answered[0]["ContentLength"]) > max_bytes:
                    raise ObjectTooLarge(f"{key}: it has more than the {max_bytes} bytes allowed")
                await asyncio.to_thread(digest.update, piece)
        return _stored(key, size, digest.hexdigest(), answered[0])

    def pieces(self, key: str) -> AsyncGenerator[bytes, None]:
        """The object in pieces of a megabyte. Raises ObjectMissing, and StoreUnavailable when it is cut."""
        return self._pieces(key)

    async def _pieces(
        self, key: str, on_answer: Callable[[GetObjectOutputTypeDef], None] = _ignored, *, first: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """The object in pieces of a megabyte; only its `first` bytes if that is not 0."""
        part: dict[str, Any] = {"Range": f"bytes=0-{first - 1}"} if first else {}
        with asked("get", key), nothing_in_range():
            async with self._limit(0) as limit:
                said = await self._client.get_object(Bucket=self._bucket, Key=key, **part)
                on_answer(said)
                promised, came = said["ContentLength"], 0
                limit.reschedule(asyncio.get_running_loop().time() + self._seconds(promised))
                gathered = bytearray()  # the network brings small pieces; our readers go to a thread with each
                async with said["Body"] as body:
                    while piece := await body.content.read(CHUNK):
                        came += len(piece)
                        gathered += piece
                        if len(gathered) >= CHUNK or came >= promised:
                            yield bytes(gathered)
                            gathered.clear()
                if came < promised:
                    raise StoreUnavailable(f"{key}: the transfer was cut")

    # --- listing and removing

    async def delete(self, *keys: str) -> None:
        """Remove objects; those that are not there are no error."""
        if self.is_absent:
            return
        for key in keys:
            with asked("delete", key), contextlib.suppress(ObjectMissing):
                async with self._limit(0):
                    await self._client.delete_object(Bucket=self._bucket, Key=key)

    async def abort_uploads(self, prefix: str, *, older_than: timedelta = timedelta(0)) -> int:
        """Give up multipart uploads below `prefix` whose writer is gone. Returns how many."""
        newest, ended = datetime.now(UTC) - older_than, 0
        if self.is_absent:
            return 0
        with contextlib.suppress(ObjectMissing), asked("list", prefix):  # some stores answer 404 where there is none
            pages = self._client.get_paginator("list_multipart_uploads")
            async for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for found in page.get("Uploads", []):
                    if found["Initiated"] > newest:
                        continue
                    with contextlib.suppress(self._client.exceptions.NoSuchUpload):
                        await self._client.abort_multipart_upload(
                            Bucket=self._bucket, Key=found["Key"], UploadId=found["UploadId"]
                        )
                    ended += 1
        return ended

    async def list(self, prefix: str) -> AsyncIterator[Stored]:
        """Every object below `prefix`; without its metadata, which a listing does not tell."""
        if self.is_absent:
            return
        with asked("list", prefix):
            pages = self._client.get_paginator("list_objects_v2")
            async for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for said in page.get("Contents", []):
                    yield Stored(said["Key"], said["Size"], "", "", said.get("ETag"), {})

    # --- signed URLs

    async def sign_get(self, key: str, *, seconds: int, download_name: str | None = None) -> str:
        """A URL that reads the object for `seconds`."""
        asked: dict[str, Any] = {"Bucket": self._bucket, "Key": key}
        if download_name is not None:
            asked["ResponseContentDisposition"] = f"attachment; filename*=UTF-8''{quote(download_name)}"
        return await self._signer.generate_presigned_url("get_object", Params=asked, ExpiresIn=seconds)

    async def sign_put(
        self, key: str, *, content_type: str, seconds: int, content_length: int | None = None, only_new: bool = False
    ) -> str:
        """A URL that writes the object for `seconds`: of that content type and, when given, that very length.

        `only_new`: where the store can refuse to overwrite, it does; whoever sends says `If-None-Match: *` then.
        """
        asked: dict[str, Any] = {"Bucket": self._bucket, "Key": key, "ContentType": content_type}
        if content_length is not None:
            asked["ContentLength"] = content_length
        if only_new and self.conditional:
            asked["IfNoneMatch"] = "*"
        return await self._signer.generate_presigned_url("put_object", Params=asked, ExpiresIn=seconds)

    def _limit(self, size: int) -> asyncio.Timeout:
        return asyncio.timeout(self._seconds(size))

    def _seconds(self, size: int) -> float:
        return self._settings.s3_operation_timeout + size / _SLOWEST_BYTES_PER_SECOND


class _Absent:
    """In place of a client."""

    def __getattr__(self, name: str) -> Any:
        raise StoreAbsent(ABSENT)


async def _remove(path: Path) -> None:
    await asyncio.shield(asyncio.to_thread(path.unlink, missing_ok=True))


def _stored(key: str, size: int, sha256: str, said: GetObjectOutputTypeDef) -> Stored:
    kind = said.get("ContentType", _UNKNOWN_TYPE)
    return Stored(key, size, sha256, kind, said.get("ETag"), _lower(said.get("Metadata", {})))


def _size_of(said: GetObjectOutputTypeDef) -> int:
    """Of the whole object, of which a part may have been asked for."""
    _, _, total = said.get("ContentRange", "").rpartition("/")
    return int(total) if total.isdecimal() else said["ContentLength"]


def _looked_through(path: Path) -> tuple[bytes | Path, str, int]:
    """What is put, its digest and its size: the very bytes that were looked at, unless they are many."""
    if path.stat().st_size > SINGLE_PUT_BYTES:
        return (path, *digest_of(path))
    data = path.read_bytes()
    return data, digest_of_bytes(data), len(data)


def _take(file: Any, digest: Any, piece: bytes) -> None:
    file.write(piece)
    digest.update(piece)
