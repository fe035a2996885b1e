"""ObjectStore: reads and writes objects in any S3 service. It never holds a large object in memory as a whole.

If the key of a put already has an object, the put compares the new bytes with the object's bytes. If they are equal,
another attempt has stored them, and the put succeeds. If they differ, a dead attempt may have left the object. Then the
put replaces the object only if the caller's `may_replace` returns True.

`probe` finds out whether the store honours `If-None-Match`. If the store does not, each put first reads the head of the
object, and two attempts may overwrite each other's object. The overwriting is harmless only because a step that runs
again makes the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
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
from leasehold.domain.ids import id_of_instant, new_id
from leasehold.settings import Settings
from leasehold.storage.content import CHUNK, digest_of, digest_of_bytes
from leasehold.storage.multipart import MAX_PARTS, PART_BYTES, put_in_parts
from leasehold.storage.s3 import PutRefused, open_client, request, suppress_refused_range, with_lower_names
from leasehold.storage.signing import UrlSigner
from leasehold.storage.streaming import Upload

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client
    from types_aiobotocore_s3.type_defs import GetObjectOutputTypeDef, MultipartUploadTypeDef


#: A file of more bytes than this gets a multipart upload.
SINGLE_PUT_BYTES = 64 * 1024 * 1024
#: The slowest supported network. A transfer of n bytes gets n divided by this number as additional seconds.
_SLOWEST_BYTES_PER_SECOND = 1024 * 1024
#: About the longest time that a put may take (the largest object, over the slowest network): 44 hours.
LONGEST_PUT = timedelta(seconds=MAX_PARTS * PART_BYTES / _SLOWEST_BYTES_PER_SECOND)
#: How many times `put` tries. It tries again when another writer has changed the object meanwhile.
_MAX_PUTS = 4
#: The content type of an object for which nobody named a type.
_UNKNOWN_TYPE = "application/octet-stream"
#: The keys of the objects that `probe` writes begin with this.
_PROBE_PREFIX = "probe/"
#: The key for which `check_answers` asks. There need not be an object with this key.
_READINESS_KEY = "readiness"


@dataclass(frozen=True, slots=True)
class Stored:
    """An object in the store. `sha256`: from the object's metadata, or "" if the store did not keep it. `modified_at`:
    by the store's clock; None except in the results of `list`.
    """

    key: str
    size: int
    sha256: str
    content_type: str
    etag: str | None
    metadata: Mapping[str, str]
    modified_at: datetime | None = None


def _never_replace(_stored: Stored) -> bool:
    return False


def _ignore_answer(_answer: GetObjectOutputTypeDef) -> None:
    return


#: The message of StoreAbsent.
ABSENT = "This installation has no object store: LEASEHOLD_OBJECT_STORE is none."


class ObjectStore:
    """The store's client, opened once in each process. `conditional`: whether puts send `If-None-Match` and `If-Match`.

    Its methods raise StoreUnavailable for temporary errors, and other StoreErrors for all other errors. They never
    raise an error of botocore.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bucket = settings.s3_bucket
        self._clients = AsyncExitStack()  # closes the opened clients
        self._client: S3Client
        self._signer: UrlSigner  # signs URLs for the endpoint that clients reach
        self.conditional = settings.s3_conditional_puts == "yes"
        self._conditional_puts_known = settings.s3_conditional_puts != "probe"
        self._probe_lock = asyncio.Lock()

    @classmethod
    def from_settings(cls, settings: Settings) -> ObjectStore:
        return cls(settings)

    async def open(self) -> None:
        settings = self._settings
        if self.is_absent:
            self._client, self._signer = cast("S3Client", _Absent()), cast("UrlSigner", _Absent())
            return
        self._client = await self._clients.enter_async_context(open_client(settings, settings.s3_endpoint))
        if settings.s3_public_endpoint is None:
            self._signer = await UrlSigner.of_client(self._client, settings)
        else:
            async with open_client(settings, settings.s3_public_endpoint) as public:
                self._signer = await UrlSigner.of_client(public, settings)

    @property
    def is_absent(self) -> bool:
        """Whether the installation has no store. Then reads and writes raise StoreAbsent, deletes do nothing, and lists
        are empty.
        """
        return self._settings.object_store == "none"

    def require(self) -> None:
        """Raises StoreAbsent if the installation has no store. Call this before accepting work that needs a store."""
        if self.is_absent:
            raise StoreAbsent(ABSENT)

    async def close(self) -> None:
        await self._clients.aclose()

    async def ensure_bucket(self) -> None:
        """Create the bucket if it does not exist."""
        if self.is_absent:
            return
        with request("bucket", self._bucket):
            async with self._timeout_for(0):
                try:
                    await self._client.head_bucket(Bucket=self._bucket)
                except self._client.exceptions.ClientError:
                    with contextlib.suppress(
                        self._client.exceptions.BucketAlreadyOwnedByYou, self._client.exceptions.BucketAlreadyExists
                    ):
                        await self._client.create_bucket(Bucket=self._bucket)

    async def probe(self) -> bool:
        """Find out whether the store honours `If-None-Match: *`. Sets `conditional` to the answer, and returns it."""
        if self.is_absent or self._settings.s3_conditional_puts != "probe":
            return self.conditional
        key = f"{_PROBE_PREFIX}{new_id()}"
        try:
            await self._put_once(key, b"1", "text/plain", {}, IfNoneMatch="*")
            await self._put_once(key, b"2", "text/plain", {}, IfNoneMatch="*")
        except PutRefused:
            self.conditional = True
        else:
            self.conditional = False
        finally:
            await self.delete(key)
        self._conditional_puts_known = True
        return self.conditional

    async def probe_once(self) -> bool:
        """Call `probe` if its answer is not known yet. Use this in processes that do not probe at their start."""
        async with self._probe_lock:
            return self.conditional if self._conditional_puts_known else await self.probe()

    async def delete_old_probes(self, older_than: timedelta) -> None:
        """Delete the probe objects that are older than `older_than`. Processes that died in `probe` left them."""
        first_kept_key = f"{_PROBE_PREFIX}{id_of_instant(datetime.now(UTC) - older_than)}"  # ids sort by time
        await self.delete(*[stored.key async for stored in self.list(_PROBE_PREFIX) if stored.key < first_kept_key])

    # --- writing

    async def put(
        self,
        key: str,
        source: bytes | Path,
        *,
        content_type: str,
        metadata: Mapping[str, str],
        may_replace: Callable[[Stored], bool] = _never_replace,
    ) -> Stored:
        """Store bytes, or a file. The result always has their sha256.

        `may_replace`: this method calls it with the existing object if the existing object has other bytes. If
        `may_replace` returns True, the put replaces the object. If it returns False, the put raises ObjectExists.
        """
        if isinstance(source, Path):
            source, sha256, size = await asyncio.to_thread(_with_digest, source)
        else:
            sha256, size = await asyncio.to_thread(digest_of_bytes, source), len(source)
        all_metadata = {**metadata, "sha256": sha256}
        put = self._put_in_parts if isinstance(source, Path) else self._put_once
        # A conditional put finds out by itself whether the key has an object.
        existing = None if self.conditional else await self.head(key)
        # Each try compares with the existing object, if one is known, and then puts. If another writer has changed the
        # object meanwhile, the next try begins with the object as it is now.
        for _ in range(_MAX_PUTS):
            if existing is not None:
                try:
                    if await self._has_bytes(existing, sha256, size):
                        # `existing` lacks the digest if the store keeps no metadata.
                        return replace(existing, sha256=sha256)
                except ObjectMissing:  # another writer has deleted it meanwhile
                    existing = await self.head(key)
                    continue
                if not may_replace(existing):
                    raise ObjectExists(key)
            precondition = self._unchanged_since(existing)
            try:
                etag = await put(key, source, content_type, all_metadata, **precondition)  # type: ignore[arg-type]  # bytes or Path, as chosen above
            except (PutRefused, ObjectMissing):  # another writer has written the object, or has deleted it
                existing = await self.head(key)
                continue
            return Stored(key, size, sha256, content_type, etag, all_metadata)
        raise StoreUnavailable(f"{key}: other writers keep changing this object")

    def _unchanged_since(self, existing: Stored | None) -> dict[str, Any]:
        """The precondition of a put, namely that nobody has written the object since `existing` was read. `existing` is
        None if there was no object.
        """
        if not self.conditional:
            return {}
        if existing is None:
            return {"IfNoneMatch": "*"}
        return {"IfMatch": existing.etag} if existing.etag else {}

    def upload(
        self,
        key: str,
        *,
        content_type: str = _UNKNOWN_TYPE,
        metadata: Mapping[str, str] | None = None,
        only_new: bool = False,
    ) -> Upload:
        """An upload whose bytes the caller writes piece by piece, to a key that no other writer uses.

        `only_new`: if the store honours `If-None-Match`, the upload's `finish` raises PutRefused when the key has an
        object.
        """
        attributes = {"ContentType": content_type, "Metadata": dict(metadata or {})}
        return Upload(
            self._client, self._bucket, key, attributes, self._timeout_for, only_new=only_new and self.conditional
        )

    async def _put_once(
        self, key: str, data: bytes, content_type: str, metadata: Mapping[str, str], **precondition: Any
    ) -> str | None:
        with request("put", key):
            async with self._timeout_for(len(data)):
                answer = await self._client.put_object(
                    Bucket=self._bucket,
                    Key=key,
                    Body=data,
                    ContentType=content_type,
                    Metadata=dict(metadata),
                    **precondition,
                )
        return answer.get("ETag")

    async def _put_in_parts(
        self, key: str, path: Path, content_type: str, metadata: Mapping[str, str], **precondition: Any
    ) -> str | None:
        size = (await asyncio.to_thread(path.stat)).st_size
        with request("put", key):
            async with self._timeout_for(size):
                return await put_in_parts(
                    self._client, self._bucket, key, path, size, content_type, metadata, **precondition
                )

    async def _has_bytes(self, existing: Stored, sha256: str, size: int) -> bool:
        if existing.size != size:
            return False
        if existing.sha256:
            return existing.sha256 == sha256
        # The store keeps no metadata, so read the bytes.
        digest = hashlib.sha256()
        async with aclosing(self._pieces(existing.key)) as pieces:
            async for piece in pieces:
                digest.update(piece)
        return digest.hexdigest() == sha256

    # --- reading

    async def head(self, key: str) -> Stored | None:
        """The object's size and metadata, or None if there is no such object."""
        try:
            with request("head", key):
                async with self._timeout_for(0):
                    answer = await self._client.head_object(Bucket=self._bucket, Key=key)
        except ObjectMissing:
            return None
        metadata = with_lower_names(answer.get("Metadata", {}))
        return Stored(
            key,
            answer["ContentLength"],
            metadata.get("sha256", ""),
            answer.get("ContentType", _UNKNOWN_TYPE),
            answer.get("ETag"),
            metadata,
        )

    async def check_answers(self, within: float) -> None:
        """Ask for an object that need not exist. Raises StoreError if the store does not answer in `within` seconds, or
        refuses the credentials.
        """
        # The timeout is inside the block `request`, which translates it into StoreUnavailable. A timeout around this
        # block would reach the block only as a cancellation, so `request` would not record that the store is away.
        with contextlib.suppress(ObjectMissing), request("readiness", _READINESS_KEY):
            async with asyncio.timeout(within):
                await self._client.head_object(Bucket=self._bucket, Key=_READINESS_KEY)

    async def read_head(self, key: str, count: int) -> bytes:
        """The first `count` bytes of the object, or all bytes of a shorter object. Raises ObjectMissing."""
        return (await self.size_and_head(key, count))[1]

    async def size_and_head(self, key: str, count: int) -> tuple[int, bytes]:
        """The object's whole size and its first `count` bytes, in one request. Raises ObjectMissing."""
        answers: list[GetObjectOutputTypeDef] = []
        head = bytearray()
        async with aclosing(self._pieces(key, answers.append, first=count)) as pieces:
            async for piece in pieces:
                head += piece
                if len(head) >= count:  # a store without ranges sends the whole object
                    break
        # There is no answer if the object is empty, because the store then refuses the range.
        size = _whole_size_of(answers[0]) if answers else 0
        return size, bytes(head[:count])

    async def fetch_file(
        self, key: str, path: Path, *, sha256: str | None = None, max_bytes: int | None = None
    ) -> Stored:
        """Download the object to `path` in pieces. Returns the size and the sha256 of the bytes that arrived.

        Raises ObjectMissing; ObjectCorrupt when the bytes do not have the digest `sha256`; ObjectTooLarge for more than
        `max_bytes`. After an error no partial file remains.
        """
        for is_last in (False, False, True):  # try again after a transfer that was cut, three tries in all
            try:
                downloaded = await self._download(key, path, max_bytes)
                break
            except StoreUnavailable:
                if is_last:
                    raise
        if sha256 is not None and downloaded.sha256 != sha256:
            await _remove_file(path)
            raise ObjectCorrupt(f"{key}: its bytes are not those that were stored")
        return downloaded

    async def _download(self, key: str, path: Path, max_bytes: int | None) -> Stored:
        answers: list[GetObjectOutputTypeDef] = []
        # `is_whole`: all bytes have arrived. If they have not, the file is removed.
        digest, size, is_whole = hashlib.sha256(), 0, False
        file = await asyncio.to_thread(path.open, "wb")
        try:
            async with aclosing(self._pieces(key, answers.append)) as pieces:
                async for piece in pieces:
                    size += len(piece)
                    if max_bytes is not None and max(size, answers[0]["ContentLength"]) > max_bytes:
                        raise ObjectTooLarge(f"{key}: it has more than the {max_bytes} bytes allowed")
                    await asyncio.to_thread(_write_and_digest, file, digest, piece)
            is_whole = True
        finally:
            file.close()
            if not is_whole:
                await _remove_file(path)
        return _stored_of(key, size, digest.hexdigest(), answers[0])

    async def fetch_bytes(self, key: str, *, sha256: str | None = None, max_bytes: int) -> bytes:
        """All bytes of a small object. Raises the same errors as `fetch_file`."""
        data = await self.read_head(key, max_bytes + 1)
        if len(data) > max_bytes:
            raise ObjectTooLarge(f"{key}: it has more than the {max_bytes} bytes allowed")
        if sha256 is not None and digest_of_bytes(data) != sha256:
            raise ObjectCorrupt(f"{key}: its bytes are not those that were stored")
        return data

    async def digest(self, key: str, *, max_bytes: int) -> Stored:
        """Read all bytes of the object, and return their size and sha256 without the bytes.

        Raises ObjectMissing, and ObjectTooLarge for more than `max_bytes`.
        """
        answers: list[GetObjectOutputTypeDef] = []
        digest, size = hashlib.sha256(), 0
        async with aclosing(self._pieces(key, answers.append)) as pieces:
            async for piece in pieces:
                size += len(piece)
                if max(size, answers[0]["ContentLength"]) > max_bytes:
                    raise ObjectTooLarge(f"{key}: it has more than the {max_bytes} bytes allowed")
                await asyncio.to_thread(digest.update, piece)
        return _stored_of(key, size, digest.hexdigest(), answers[0])

    def pieces(self, key: str) -> AsyncGenerator[bytes, None]:
        """The object in pieces of a megabyte. Raises ObjectMissing, and StoreUnavailable when the transfer is cut."""
        return self._pieces(key)

    async def _pieces(
        self, key: str, on_answer: Callable[[GetObjectOutputTypeDef], None] = _ignore_answer, *, first: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """The object in pieces of a megabyte. `first`: how many bytes to read from the beginning; 0: all bytes.
        `on_answer` gets the store's answer before the first piece.
        """
        byte_range: dict[str, Any] = {"Range": f"bytes=0-{first - 1}"} if first else {}
        with request("get", key), suppress_refused_range():
            async with self._timeout_for(0):
                answer = await self._client.get_object(Bucket=self._bucket, Key=key, **byte_range)
            on_answer(answer)
            expected, received = answer["ContentLength"], 0
            clock = asyncio.get_running_loop().time
            deadline = clock() + self._seconds_for(expected)
            chunk = bytearray()  # joins small reads of the network, because callers start a thread for each piece
            async with answer["Body"] as body:
                while True:
                    # No timeout may span the `yield`, because it would cancel the caller's own code with a bare
                    # CancelledError.
                    async with asyncio.timeout_at(deadline):
                        piece = await body.content.read(CHUNK)
                    if not piece:
                        break
                    received += len(piece)
                    chunk += piece
                    if len(chunk) >= CHUNK or received >= expected:
                        yielded_at = clock()
                        yield bytes(chunk)
                        deadline += clock() - yielded_at  # the time that the caller took does not count
                        chunk.clear()
            if received < expected:
                raise StoreUnavailable(f"{key}: the transfer was cut")

    # --- listing and removing

    async def delete(self, *keys: str) -> None:
        """Delete objects. A key without an object is not an error."""
        if self.is_absent:
            return
        for key in keys:
            with request("delete", key), contextlib.suppress(ObjectMissing):
                async with self._timeout_for(0):
                    await self._client.delete_object(Bucket=self._bucket, Key=key)

    async def abort_uploads(self, prefix: str, *, older_than: timedelta | None = None) -> int:
        """Abort the multipart uploads below `prefix`. `older_than`: abort only uploads that began at least this long
        ago by this process's clock; None: all uploads. Returns their number.
        """
        if older_than is None:
            return await self._abort_uploads(prefix, lambda _upload: True)
        began_before = datetime.now(UTC) - older_than
        return await self._abort_uploads(prefix, lambda upload: upload["Initiated"] <= began_before)

    async def abort_uploads_to(self, key: str) -> int:
        """Abort the multipart uploads to this key, but no upload to a longer key that begins with this key. Returns
        their number.
        """
        return await self._abort_uploads(key, lambda upload: upload["Key"] == key)

    async def _abort_uploads(self, prefix: str, includes: Callable[[MultipartUploadTypeDef], bool]) -> int:
        aborted = 0
        if self.is_absent:
            return 0
        with contextlib.suppress(ObjectMissing), request("list", prefix):  # some stores answer 404 for an empty list
            pages = self._client.get_paginator("list_multipart_uploads")
            async for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for upload in page.get("Uploads", []):
                    if includes(upload):
                        await self._abort_upload(upload["Key"], upload["UploadId"])
                        aborted += 1
        return aborted

    async def _abort_upload(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(self._client.exceptions.NoSuchUpload):
            await self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)

    async def list(self, prefix: str) -> AsyncGenerator[Stored, None]:
        """Every object below `prefix`, without its metadata, which S3 listings do not contain."""
        if self.is_absent:
            return
        with request("list", prefix):
            pages = self._client.get_paginator("list_objects_v2")
            async for page in pages.paginate(Bucket=self._bucket, Prefix=prefix):
                for entry in page.get("Contents", []):
                    yield Stored(entry["Key"], entry["Size"], "", "", entry.get("ETag"), {}, entry.get("LastModified"))

    # --- signed URLs

    def sign_get(self, key: str, *, seconds: int, download_name: str | None = None) -> str:
        """A URL that reads the object for `seconds`, at most a week."""
        query = {}
        if download_name is not None:
            query["response-content-disposition"] = f"attachment; filename*=UTF-8''{quote(download_name)}"
        return self._signer.sign("GET", key, seconds=seconds, query=query)

    def sign_put(
        self, key: str, *, content_type: str, seconds: int, content_length: int | None = None, only_new: bool = False
    ) -> str:
        """A URL that writes the object for `seconds`, at most a week. The client must send this content type, and this
        content length if it is not None.

        `only_new`: if the store honours `If-None-Match`, it refuses to overwrite. The client must then send the header
        `If-None-Match: *`.
        """
        headers = {"Content-Type": content_type}
        if content_length is not None:
            headers["Content-Length"] = str(content_length)
        if only_new and self.conditional:
            headers["If-None-Match"] = "*"
        return self._signer.sign("PUT", key, seconds=seconds, headers=headers)

    def _timeout_for(self, size: int) -> asyncio.Timeout:
        return asyncio.timeout(self._seconds_for(size))

    def _seconds_for(self, size: int) -> float:
        return self._settings.s3_operation_timeout + size / _SLOWEST_BYTES_PER_SECOND


class _Absent:
    """The client, and the signer, of an installation without a store. Every use raises StoreAbsent."""

    def __getattr__(self, name: str) -> Any:
        raise StoreAbsent(ABSENT)


async def _remove_file(path: Path) -> None:
    await asyncio.shield(asyncio.to_thread(path.unlink, missing_ok=True))


def _stored_of(key: str, size: int, sha256: str, answer: GetObjectOutputTypeDef) -> Stored:
    content_type = answer.get("ContentType", _UNKNOWN_TYPE)
    return Stored(key, size, sha256, content_type, answer.get("ETag"), with_lower_names(answer.get("Metadata", {})))


def _whole_size_of(answer: GetObjectOutputTypeDef) -> int:
    """The size of the whole object, even if the answer has only a range of its bytes."""
    _, _, total = answer.get("ContentRange", "").rpartition("/")
    return int(total) if total.isdecimal() else answer["ContentLength"]


def _with_digest(path: Path) -> tuple[bytes | Path, str, int]:
    """The source of a put (the bytes of a small file, or the path of a large file), its sha256 and its size.

    A small file is read only once. So its bytes and its digest agree even if the file changes later.
    """
    if path.stat().st_size > SINGLE_PUT_BYTES:
        return (path, *digest_of(path))
    data = path.read_bytes()
    return data, digest_of_bytes(data), len(data)


def _write_and_digest(file: Any, digest: Any, piece: bytes) -> None:
    file.write(piece)
    digest.update(piece)
