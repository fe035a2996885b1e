"""The two kinds of promotion target: another bucket, or an HTTP file service. To promote a conversion is to copy its
artifacts there.

copying.py uses these classes. `create` writes an object only if the key holds no object, and `replace` overwrites the
object at the key. `call_id`: identifies the call to the promote endpoint, by which the object is written
(ownership.PromoteCall).
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import structlog

from leasehold.domain.errors import BadGateway, StoreError, Unavailable
from leasehold.pipelines.conversion.promotion.ownership import target_exists
from leasehold.security.egress import Answer, Egress, EgressFailed, EgressRefused
from leasehold.security.oauth import Client, Tokens
from leasehold.settings import Settings
from leasehold.storage.s3 import PutRefused
from leasehold.storage.store import ObjectStore

log = structlog.get_logger(__name__)

#: Seconds that the transfer of one artifact may take.
_MAX_SECONDS = 300.0
#: The largest object of a file service that can be replaced, in bytes. The size is bounded, because the object is first
#: downloaded as a backup.
_MAX_BACKUP_BYTES = 2 * 1024**3
#: The content type of every object that is copied.
_BINARY = "application/octet-stream"
#: The field in an object's metadata that names the call that wrote the object.
_CALL_FIELD = "promotion"


class Existing(Enum):
    """Whether an object lies at a key."""

    NOTHING = "nothing"
    SOMETHING = "something"
    UNKNOWN = "unknown"  # the target does not report it


class Target(Protocol):
    """A place to promote to. Every method raises BadGateway if the target fails or refuses."""

    async def existing(self, key: str) -> Existing:
        """Whether an object lies at the key."""

    async def create(self, key: str, source: str, size: int, call_id: str) -> bool:
        """Copy the object `source` of the installation's store to the key, if no object lies there.

        Returns True if an undo may call `remove`, because the target has certainly created the object, or because
        `remove` recognises and keeps the objects of other calls. Returns False if neither holds: the target may have
        replaced an object. If the target reports that an object lies at the key, raises Conflict `target_exists`.
        """

    async def replace(self, key: str, source: str, size: int, call_id: str) -> None:
        """Copy the object `source` of the installation's store over the object at the key."""

    async def back_up(self, key: str, backup: str) -> None:
        """Copy the object at the key to the key `backup` of the installation's store."""

    async def restore(self, key: str, backup: str) -> None:
        """Copy the object `backup` of the installation's store back to the key."""

    async def remove(self, key: str, call_id: str) -> None:
        """Remove the object at the key, if the call created it. A target that records no calls removes any object at
        the key.
        """


@asynccontextmanager
async def open_target(settings: Settings, store: ObjectStore) -> AsyncIterator[Target]:
    """The promotion target of the settings, open until the block ends. Raises Unavailable if the settings have none."""
    if settings.promote_url is not None:
        async with Egress.from_settings(settings) as egress:
            client = Client.of_promotions(settings)
            tokens = None if client is None else Tokens(egress, client)
            fixed_token = settings.promote_token.get_secret_value()
            yield _FileService(egress, store, settings.promote_url, fixed_token, tokens)
    elif settings.promote_bucket is not None:
        settings.refuse_own_bucket()
        target_store = ObjectStore.from_settings(settings.model_copy(update={"s3_bucket": settings.promote_bucket}))
        await target_store.open()
        try:
            yield _Bucket(store, target_store, conditional=settings.s3_conditional_puts != "no")
        finally:
            await target_store.close()
    else:
        raise Unavailable(
            "promotion_not_configured",
            "This installation has no LEASEHOLD_PROMOTE_BUCKET and no LEASEHOLD_PROMOTE_URL.",
        )


def is_configured(settings: Settings) -> bool:
    return settings.promote_url is not None or settings.promote_bucket is not None


def _promotion_failed(key: str) -> BadGateway:
    return BadGateway("promotion_failed", f"{key} could not be written to the target; nothing was promoted.")


class _Bucket:
    """Another bucket. `conditional`: `create` sends `If-None-Match`, so that the store refuses the put if the key holds
    an object.

    Some stores ignore this header. So when all bytes have arrived, `create` also asks whether the key holds an object.
    With a store that ignores the header, the upload can then only overwrite an object that somebody writes between this
    question and the end of the upload.
    """

    def __init__(self, store: ObjectStore, target_store: ObjectStore, *, conditional: bool) -> None:
        self._store = store
        self._target_store = target_store
        self._conditional = conditional

    async def existing(self, key: str) -> Existing:
        with _as_bad_gateway(key):
            return Existing.NOTHING if await self._target_store.head(key) is None else Existing.SOMETHING

    async def create(self, key: str, source: str, size: int, call_id: str) -> bool:
        try:
            await self._copy(self._store, source, self._target_store, key, key, size, call_id, only_new=True)
        except PutRefused:
            raise target_exists(key) from None
        # Return True even if the store ignores the header and may have replaced an object. An undo never removes an
        # object of another call, because `remove` reads the call from the object's metadata.
        return True

    async def replace(self, key: str, source: str, size: int, call_id: str) -> None:
        await self._copy(self._store, source, self._target_store, key, key, size, call_id)

    async def back_up(self, key: str, backup: str) -> None:
        await self._copy(self._target_store, key, self._store, backup, key, None, "")

    async def restore(self, key: str, backup: str) -> None:
        await self._copy(self._store, backup, self._target_store, key, key, None, "")

    async def remove(self, key: str, call_id: str) -> None:
        with _as_bad_gateway(key):
            await self._target_store.abort_uploads_to(key)
            stored_object = await self._target_store.head(key)
            if stored_object is None:
                return
            if stored_object.metadata.get(_CALL_FIELD) != call_id:
                log.warning("an object at the promotion target stays: another call wrote it", key=key)
                return
            await self._target_store.delete(key)

    async def _copy(
        self,
        source_store: ObjectStore,
        source: str,
        destination_store: ObjectStore,
        destination: str,
        target_key: str,
        size: int | None,
        call_id: str,
        *,
        only_new: bool = False,
    ) -> None:
        """Copy the object `source` to the key `destination`. `target_key`: the key at the target, for errors, because a
        client does not know the keys of the installation's store. `size`: raise BadGateway if the copy has another
        size; None: accept any size. `call_id`: the call that the object's metadata names; "": the metadata names no
        call. `only_new`: raise PutRefused if `destination` holds an object.
        """
        metadata = {_CALL_FIELD: call_id} if call_id else {}
        upload = destination_store.upload(
            destination, content_type=_BINARY, metadata=metadata, only_new=only_new and self._conditional
        )
        with _as_bad_gateway(target_key):
            async with upload:
                async for piece in source_store.pieces(source):
                    await upload.write(piece)
                if size is not None and upload.size != size:
                    raise _promotion_failed(target_key)
                if only_new and await destination_store.head(destination) is not None:
                    raise PutRefused(destination)
                await upload.finish()


@contextmanager
def _as_bad_gateway(key: str) -> Iterator[None]:
    """Raise errors of a store as BadGateway. PutRefused passes unchanged, because the caller handles it. PutRefused
    means that the key already holds an object, or that another put to this key is under way.
    """
    try:
        yield
    except PutRefused:
        raise
    except StoreError as error:
        log.warning("a promotion failed", error=type(error).__name__)
        raise _promotion_failed(key) from error


class _FileService:
    """An HTTP file service. Requests have a bearer token, which comes from `tokens` (OAuth) or, if `tokens` is None, is
    the fixed `token`. If `token` is empty, too, requests have no token. `PUT {base}/{key}` with `If-None-Match: *`
    creates an object, `PUT` without this header replaces it, and `DELETE` removes it. A service may lack `HEAD`:
    `existing` then returns UNKNOWN. At a service without `GET` no object can be replaced, because `back_up` first
    downloads the old object. A service at a private address is refused, unless a setting allows its network.
    """

    def __init__(self, egress: Egress, store: ObjectStore, base: str, token: str, tokens: Tokens | None) -> None:
        self._egress = egress
        self._store = store
        self._base = base.rstrip("/")
        self._token = token
        self._tokens = tokens

    async def existing(self, key: str) -> Existing:
        answer = await self._ask("HEAD", key, {})
        if _is_success(answer):
            return Existing.SOMETHING
        if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            return Existing.NOTHING
        if answer.status in (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED):
            return Existing.UNKNOWN
        raise _promotion_refused(key, answer)

    async def create(self, key: str, source: str, size: int, call_id: str) -> bool:
        request_headers = {
            "Content-Length": str(size),
            "Content-Type": _BINARY,
            "If-None-Match": "*",
            "X-Request-Id": call_id,
        }
        answer = await self._ask("PUT", key, request_headers, partial(self._store.pieces, source))
        if answer.status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT):
            raise target_exists(key)
        if not _is_success(answer):
            raise _promotion_refused(key, answer)
        # Only 201 means "created". With another success, such as 204, a service that ignores `If-None-Match` may have
        # replaced an object.
        return answer.status == HTTPStatus.CREATED

    async def replace(self, key: str, source: str, size: int, call_id: str) -> None:
        request_headers = {"Content-Length": str(size), "Content-Type": _BINARY, "X-Request-Id": call_id}
        answer = await self._ask("PUT", key, request_headers, partial(self._store.pieces, source))
        if not _is_success(answer):
            raise _promotion_refused(key, answer)

    async def back_up(self, key: str, backup: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "backup"
            status = await self._download(key, path)
            if status == HTTPStatus.UNAUTHORIZED and self._tokens is not None:
                self._tokens.forget()  # the token may be revoked, so ask again with a new token
                status = await self._download(key, path)
            if status != HTTPStatus.OK:
                log.warning("the file service does not return the object that is to be replaced", status=status)
                raise _promotion_failed(key)
            with _as_bad_gateway(key):
                await self._store.put(
                    backup, path, content_type=_BINARY, metadata={}, may_replace=lambda _existing: True
                )

    async def _download(self, key: str, path: Path) -> int:
        """Download the object at the key into `path`. Returns the status of the answer."""
        try:
            download = await self._egress.download(
                self._url(key),
                path,
                max_bytes=_MAX_BACKUP_BYTES,
                timeout=_MAX_SECONDS,
                headers=await self._authorization(),
            )
        except (EgressRefused, EgressFailed) as error:
            raise _promotion_failed(key) from error
        return download.status

    async def restore(self, key: str, backup: str) -> None:
        with _as_bad_gateway(key):
            head = await self._store.head(backup)
        if head is None:
            log.warning("the backup of a promoted object is missing", key=key)
            raise _promotion_failed(key)
        await self.replace(key, backup, head.size, "")

    async def remove(self, key: str, call_id: str) -> None:
        answer = await self._ask("DELETE", key, {"X-Request-Id": call_id})
        if not _is_success(answer) and answer.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise _promotion_refused(key, answer)

    async def _authorization(self) -> dict[str, str]:
        token = self._token if self._tokens is None else await self._tokens.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _url(self, key: str) -> str:
        return f"{self._base}/{quote(key, safe='/~')}"

    async def _ask(
        self,
        method: str,
        key: str,
        request_headers: dict[str, str],
        content: Callable[[], AsyncIterable[bytes]] | None = None,
    ) -> Answer:
        # `content`: makes the body, once for each try
        answer = await self._ask_once(method, key, request_headers, content)
        if answer.status == HTTPStatus.UNAUTHORIZED and self._tokens is not None:
            self._tokens.forget()  # the token may be revoked, so send the request again with a new token
            answer = await self._ask_once(method, key, request_headers, content)
        return answer

    async def _ask_once(
        self, method: str, key: str, request_headers: dict[str, str], content: Callable[[], AsyncIterable[bytes]] | None
    ) -> Answer:
        # Empty headers are left out. For example, `restore` belongs to no call, so its `X-Request-Id` is empty.
        headers = {name: value for name, value in {**await self._authorization(), **request_headers}.items() if value}
        body = b"" if content is None else content()
        try:
            return await self._egress.request(
                method, self._url(key), headers=headers, content=body, timeout=_MAX_SECONDS, reads_body=False
            )
        except (EgressRefused, EgressFailed, StoreError) as error:
            log.warning("a promotion failed", error=type(error).__name__, code=getattr(error, "code", None))
            raise _promotion_failed(key) from error


def _is_success(answer: Answer) -> bool:
    return 200 <= answer.status < 300  # noqa: PLR2004 - HTTP's successes


def _promotion_refused(key: str, answer: Answer) -> BadGateway:
    log.warning("a promotion was refused", status=answer.status)
    return _promotion_failed(key)
