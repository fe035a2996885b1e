"""Where promoted artifacts go: another bucket, or an HTTP file service. Puts are create-only but where they replace."""

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
from leasehold.pipelines.conversion.promotion.ownership import exists
from leasehold.security.egress import Answer, Egress, EgressFailed, EgressRefused
from leasehold.security.oauth import Client, Tokens
from leasehold.settings import Settings
from leasehold.storage.s3 import PutRefused
from leasehold.storage.store import ObjectStore

log = structlog.get_logger(__name__)

#: The longest that one artifact may take, in seconds.
_MAX_SECONDS = 300.0
#: Of what is replaced, and so kept meanwhile.
_MAX_BACKUP_BYTES = 2 * 1024**3
_BINARY = "application/octet-stream"
#: Which call wrote an object.
_TURN = "promotion"


class Found(Enum):
    NOTHING = "nothing"
    SOMETHING = "something"
    UNTOLD = "untold"  # the target does not say what lies there


class Target(Protocol):
    """`turn` names the call. Everything raises BadGateway when the target does not do its part."""

    async def look(self, key: str) -> Found:
        """What lies there."""

    async def create(self, key: str, source: str, size: int, turn: str) -> bool:
        """Copy the object `source` of our store there, if nothing is. Whether it is certain that nothing was.

        Raises Conflict `target_exists` where something is; then the call did nothing.
        """

    async def replace(self, key: str, source: str, size: int, turn: str) -> None:
        """Copy the object `source` over what lies there."""

    async def back_up(self, key: str, backup: str) -> None:
        """Copy what lies there to the key `backup` of our store."""

    async def restore(self, key: str, backup: str) -> None:
        """Put back what `back_up` kept."""

    async def remove(self, key: str, turn: str) -> None:
        """Remove what the call created; what it did not, stays where the target can tell."""


@asynccontextmanager
async def open_target(settings: Settings, store: ObjectStore) -> AsyncIterator[Target]:
    """Raises Unavailable when this installation has none."""
    if settings.promote_url is not None:
        async with Egress.from_settings(settings) as egress:
            client = Client.of_promotions(settings)
            tokens = None if client is None else Tokens(egress, client)
            fixed = settings.promote_token.get_secret_value()
            yield _FileService(egress, store, settings.promote_url, fixed, tokens)
    elif settings.promote_bucket is not None:
        settings.refuse_own_bucket()
        other = ObjectStore.from_settings(settings.model_copy(update={"s3_bucket": settings.promote_bucket}))
        await other.open()
        try:
            yield _Bucket(store, other, conditional=settings.s3_conditional_puts != "no")
        finally:
            await other.close()
    else:
        raise Unavailable(
            "promotion_not_configured",
            "This installation has no LEASEHOLD_PROMOTE_BUCKET and no LEASEHOLD_PROMOTE_URL.",
        )


def is_configured(settings: Settings) -> bool:
    return settings.promote_url is not None or settings.promote_bucket is not None


def _failed(key: str) -> BadGateway:
    return BadGateway("promotion_failed", f"{key} could not be written to the target; nothing was promoted.")


class _Bucket:
    def __init__(self, store: ObjectStore, other: ObjectStore, *, conditional: bool) -> None:
        self._store = store
        self._other = other
        self._conditional = conditional

    async def look(self, key: str) -> Found:
        with _told(key):
            return Found.NOTHING if await self._other.head(key) is None else Found.SOMETHING

    async def create(self, key: str, source: str, size: int, turn: str) -> bool:
        try:
            await self._copy(self._store, source, self._other, key, size, turn, only_new=self._conditional)
        except PutRefused:
            raise exists(key) from None
        return True

    async def replace(self, key: str, source: str, size: int, turn: str) -> None:
        await self._copy(self._store, source, self._other, key, size, turn)

    async def back_up(self, key: str, backup: str) -> None:
        await self._copy(self._other, key, self._store, backup, None, "")

    async def restore(self, key: str, backup: str) -> None:
        await self._copy(self._store, backup, self._other, key, None, "")

    async def remove(self, key: str, turn: str) -> None:
        with _told(key):
            await self._other.abort_uploads(key)
            there = await self._other.head(key)
            if there is None:
                return
            if there.metadata.get(_TURN) != turn:
                log.warning("an object at the promotion target is not the call's own, and stays", key=key)
                return
            await self._other.delete(key)

    async def _copy(
        self,
        of: ObjectStore,
        source: str,
        to: ObjectStore,
        key: str,
        size: int | None,
        turn: str,
        *,
        only_new: bool = False,
    ) -> None:
        with _told(key):
            marks = {_TURN: turn} if turn else {}
            async with to.upload(key, content_type=_BINARY, metadata=marks, only_new=only_new) as upload:
                async for piece in of.pieces(source):
                    await upload.write(piece)
                if size is not None and upload.size != size:
                    raise _failed(key)
                await upload.finish()


@contextmanager
def _told(key: str) -> Iterator[None]:
    """Errors of the store as BadGateway; that something lies there already is the caller's to see."""
    try:
        yield
    except PutRefused:
        raise
    except StoreError as error:
        log.warning("a promotion failed", error=type(error).__name__)
        raise _failed(key) from error


class _FileService:
    """`PUT {base}/{key}` with a bearer token creates, with `If-None-Match: *`; `DELETE` takes it back; `HEAD` says what
    is there, and `GET` gives it back, if the service knows them. Never at a private address but by setting.
    """

    def __init__(self, egress: Egress, store: ObjectStore, base: str, token: str, tokens: Tokens | None) -> None:
        self._egress = egress
        self._store = store
        self._base = base.rstrip("/")
        self._token = token
        self._tokens = tokens

    async def look(self, key: str) -> Found:
        answer = await self._ask("HEAD", key, {})
        if _is_success(answer):
            return Found.SOMETHING
        if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            return Found.NOTHING
        if answer.status in (HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED):
            return Found.UNTOLD
        raise _refused(key, answer)

    async def create(self, key: str, source: str, size: int, turn: str) -> bool:
        said = {"Content-Length": str(size), "Content-Type": _BINARY, "If-None-Match": "*", "X-Request-Id": turn}
        answer = await self._ask("PUT", key, said, partial(self._store.pieces, source))
        if answer.status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT):
            raise exists(key)
        if not _is_success(answer):
            raise _refused(key, answer)
        return answer.status == HTTPStatus.CREATED

    async def replace(self, key: str, source: str, size: int, turn: str) -> None:
        said = {"Content-Length": str(size), "Content-Type": _BINARY, "X-Request-Id": turn}
        answer = await self._ask("PUT", key, said, partial(self._store.pieces, source))
        if not _is_success(answer):
            raise _refused(key, answer)

    async def back_up(self, key: str, backup: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "backup"
            headers = await self._authorization()
            try:
                got = await self._egress.download(
                    self._url(key), path, max_bytes=_MAX_BACKUP_BYTES, timeout=_MAX_SECONDS, headers=headers
                )
            except (EgressRefused, EgressFailed) as error:
                raise _failed(key) from error
            if got.status != HTTPStatus.OK:
                log.warning("a file service does not give back what is to be replaced", status=got.status)
                raise _failed(key)
            with _told(key):
                await self._store.put(backup, path, content_type=_BINARY, metadata={}, may_replace=lambda _there: True)

    async def restore(self, key: str, backup: str) -> None:
        with _told(key):
            kept = await self._store.head(backup)
        if kept is None:
            log.warning("a backup of a promoted object is gone", key=key)
            raise _failed(key)
        await self.replace(key, backup, kept.size, "")

    async def remove(self, key: str, turn: str) -> None:
        answer = await self._ask("DELETE", key, {"X-Request-Id": turn})
        if not _is_success(answer) and answer.status not in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            raise _refused(key, answer)

    async def _authorization(self) -> dict[str, str]:
        token = self._token if self._tokens is None else await self._tokens.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _url(self, key: str) -> str:
        return f"{self._base}/{quote(key, safe='/~')}"

    async def _ask(
        self, method: str, key: str, said: dict[str, str], content: Callable[[], AsyncIterable[bytes]] | None = None
    ) -> Answer:
        answer = await self._ask_once(method, key, said, content)
        if answer.status == HTTPStatus.UNAUTHORIZED and self._tokens is not None:
            self._tokens.forget()  # revoked before its end: once more, with a fresh one
            answer = await self._ask_once(method, key, said, content)
        return answer

    async def _ask_once(
        self, method: str, key: str, said: dict[str, str], content: Callable[[], AsyncIterable[bytes]] | None
    ) -> Answer:
        headers = {name: value for name, value in {**await self._authorization(), **said}.items() if value}
        body = b"" if content is None else content()
        try:
            return await self._egress.request(
                method, self._url(key), headers=headers, content=body, timeout=_MAX_SECONDS
            )
        except (EgressRefused, EgressFailed, StoreError) as error:
            log.warning("a promotion failed", error=type(error).__name__, code=getattr(error, "code", None))
            raise _failed(key) from error


def _is_success(answer: Answer) -> bool:
    return 200 <= answer.status < 300  # noqa: PLR2004 - HTTP's successes


def _refused(key: str, answer: Answer) -> BadGateway:
    log.warning("a promotion was refused", status=answer.status)
    return _failed(key)
