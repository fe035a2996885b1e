"""Where promoted artifacts go: another bucket, or an HTTP file service. A target that was written can be taken back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol
from urllib.parse import quote

import structlog

from leasehold.egress import Egress, EgressFailed, EgressRefused
from leasehold.errors import BadGateway, StoreError, Unavailable
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore

log = structlog.get_logger(__name__)

#: The longest that one artifact may take, in seconds.
_MOST_SECONDS = 300.0
_BINARY = "application/octet-stream"


class Destination(Protocol):
    async def put(self, key: str, source: str, size: int) -> None:
        """Copy the object `source` of our store there. Raises BadGateway."""

    async def take_back(self, key: str) -> None:
        """Remove what `put` wrote. Raises BadGateway."""


@asynccontextmanager
async def open_destination(settings: Settings, store: ObjectStore) -> AsyncIterator[Destination]:
    """Raises Unavailable when this installation has none."""
    if settings.promote_url is not None:
        async with Egress.from_settings(settings) as egress:
            yield _FileService(egress, store, settings.promote_url, settings.promote_token.get_secret_value())
    elif settings.promote_bucket is not None:
        other = ObjectStore.from_settings(settings.model_copy(update={"s3_bucket": settings.promote_bucket}))
        await other.open()
        try:
            yield _Bucket(store, other)
        finally:
            await other.close()
    else:
        raise Unavailable(
            "promotion_not_configured",
            "This installation has no LEASEHOLD_PROMOTE_BUCKET and no LEASEHOLD_PROMOTE_URL.",
        )


def _failed(key: str) -> BadGateway:
    return BadGateway("promotion_failed", f"{key} could not be written to the target; nothing was promoted.")


class _Bucket:
    def __init__(self, store: ObjectStore, other: ObjectStore) -> None:
        self._store = store
        self._other = other

    async def put(self, key: str, source: str, size: int) -> None:
        try:
            async with self._other.upload(key, content_type=_BINARY) as upload:
                async for piece in self._store.pieces(source):
                    await upload.write(piece)
                if upload.size != size:
                    raise _failed(key)
                await upload.finish()
        except StoreError as error:
            log.warning("a promotion failed", error=type(error).__name__)
            raise _failed(key) from error

    async def take_back(self, key: str) -> None:
        try:
            await self._other.delete(key)
        except StoreError as error:
            raise _failed(key) from error


class _FileService:
    """`PUT {base}/{key}` with a bearer token; `DELETE` takes it back. Never to a private address but by setting."""

    def __init__(self, egress: Egress, store: ObjectStore, base: str, token: str) -> None:
        self._egress = egress
        self._store = store
        self._base = base.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def put(self, key: str, source: str, size: int) -> None:
        headers = self._headers | {"Content-Length": str(size), "Content-Type": _BINARY}
        await self._ask("PUT", key, headers, self._store.pieces(source))

    async def take_back(self, key: str) -> None:
        await self._ask("DELETE", key, self._headers, b"")

    async def _ask(self, method: str, key: str, headers: dict[str, str], content: bytes | AsyncIterator[bytes]) -> None:
        url = f"{self._base}/{quote(key, safe='/')}"
        try:
            answer = await self._egress.request(method, url, headers=headers, content=content, timeout=_MOST_SECONDS)
        except (EgressRefused, EgressFailed, StoreError) as error:
            log.warning("a promotion failed", error=type(error).__name__, code=getattr(error, "code", None))
            raise _failed(key) from error
        if not 200 <= answer.status < 300:  # noqa: PLR2004 - HTTP's successes
            log.warning("a promotion was refused", status=answer.status)
            raise _failed(key)
