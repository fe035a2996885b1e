"""Another bucket as the target of promotions: on a store that honours conditional puts, and on one that does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from leasehold.domain.errors import BadGateway, Conflict
from leasehold.pipelines.conversion.promotion.targets import Target, open_target
from leasehold.settings import Settings
from leasehold.storage import ObjectStore

KEY, SOURCE, CALL = "acme/a.nef", "jobs/1/steps/nef/a.nef", "call"
BYTES = b"model" * 2_000_000  # more than one part of an upload
TEXT: dict[str, Any] = {"content_type": "text/plain", "metadata": {}}


@pytest.fixture(params=["probe", "no"])
def target_settings(request: pytest.FixtureRequest, store_settings: Settings) -> Settings:
    changes = {"promote_bucket": f"{store_settings.s3_bucket}-served", "s3_conditional_puts": request.param}
    return store_settings.model_copy(update=changes)


@pytest.fixture
async def served(target_settings: Settings) -> AsyncIterator[ObjectStore]:
    """The store of the bucket that is the target."""
    opened = ObjectStore(target_settings.model_copy(update={"s3_bucket": target_settings.promote_bucket}))
    await opened.open()
    await opened.ensure_bucket()
    yield opened
    await opened.close()


@pytest.fixture
async def target(target_settings: Settings, store: ObjectStore) -> AsyncIterator[Target]:
    async with open_target(target_settings, store) as opened:
        yield opened


@pytest.mark.parametrize("data", [b"small", BYTES], ids=["in one request", "in parts"])
async def test_an_object_that_appears_during_a_copy_is_not_overwritten(
    target: Target, store: ObjectStore, served: ObjectStore, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    await store.put(SOURCE, data, **TEXT)
    pieces = store.pieces

    async def pieces_while_another_puts(key: str) -> AsyncGenerator[bytes, None]:
        async for piece in pieces(key):
            yield piece
        await served.put(KEY, b"of another", **TEXT)

    monkeypatch.setattr(store, "pieces", pieces_while_another_puts)
    with pytest.raises(Conflict) as refused:
        await target.create(KEY, SOURCE, len(data), CALL)
    assert refused.value.code == "target_exists"
    assert await served.fetch_bytes(KEY, max_bytes=100) == b"of another"


async def test_a_backup_that_fails_names_the_key_that_the_client_knows(target: Target, served: ObjectStore) -> None:
    with pytest.raises(BadGateway) as failed:
        await target.back_up(KEY, "jobs/1/promotion/call/0")  # the target has no such object
    assert failed.value.message == f"{KEY} could not be written to the target; nothing was promoted."


async def test_the_undo_of_a_copy_ends_no_upload_to_a_key_that_begins_with_its_own(
    target: Target, served: ObjectStore
) -> None:
    """Another call, or another program, may upload there."""
    async with served.upload(f"{KEY}.sig") as of_another, served.upload(KEY) as dead:
        await of_another.write(BYTES)
        await dead.write(BYTES)
        await target.remove(KEY, CALL)
        await of_another.finish()
        assert await served.abort_uploads(KEY) == 0  # the undo has ended the other upload
    assert await served.fetch_bytes(f"{KEY}.sig", max_bytes=len(BYTES)) == BYTES
