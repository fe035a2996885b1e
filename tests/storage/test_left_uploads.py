"""An upload that fails while the store is away ends with its own error, not with the one of tidying up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import pytest

from leasehold.settings import Settings
from leasehold.storage import ObjectStore, multipart
from leasehold.storage import store as store_module
from leasehold.storage.streaming import PART_BYTES
from tests.api.proxy import Proxy, proxy_to


@pytest.fixture
async def way(store: ObjectStore, store_settings: Settings) -> AsyncIterator[Proxy]:
    assert store is not None  # the bucket is there
    at = urlsplit(store_settings.s3_endpoint or "")
    async with proxy_to(at.hostname or "", at.port or 0) as proxy:
        yield proxy


@pytest.fixture
async def far(way: Proxy, store_settings: Settings) -> AsyncIterator[ObjectStore]:
    """The same store, at the end of a way that can be cut."""
    opened = ObjectStore.from_settings(
        store_settings.model_copy(update={"s3_endpoint": f"http://127.0.0.1:{way.port}"})
    )
    await opened.open()
    yield opened
    await opened.close()


async def test_a_file(far: ObjectStore, way: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lose(_parts: Any) -> NoReturn:
        await way.cut()
        raise KeyError("of the upload")

    monkeypatch.setattr(multipart, "gather_or_cancel", lose)
    monkeypatch.setattr(store_module, "SINGLE_PUT_BYTES", 0)
    (tmp_path / "large").write_bytes(b"large")
    with pytest.raises(KeyError, match="of the upload"):
        await far.put("a/key", tmp_path / "large", content_type="text/plain", metadata={})


async def test_pieces(far: ObjectStore, way: Proxy) -> None:
    async def leave() -> NoReturn:
        async with far.upload("a/key") as upload:
            await upload.write(bytes(2 * PART_BYTES))
            await way.cut()
            raise KeyError("of the upload")

    with pytest.raises(KeyError, match="of the upload"):
        await leave()


async def test_an_upload_of_this_moment_is_aborted_by_a_process_whose_clock_is_behind(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Behind(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]  # a plain datetime will do
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(store_module, "datetime", Behind)
    async with store.upload("a/key") as upload:
        await upload.write(bytes(PART_BYTES))
        assert await store.abort_uploads("a/") == 1
