"""The client of the store repeats a request whose answer was lost: what the first request did is the caller's own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from leasehold.domain.errors import Conflict, ObjectExists
from leasehold.pipelines.conversion.promotion.targets import _Bucket
from leasehold.storage import ObjectStore
from leasehold.storage import store as store_module
from leasehold.storage.s3 import PutRefused
from leasehold.storage.streaming import PART_BYTES
from tests.storage.conftest import settings_of
from tests.storage.lost_answers import LostAnswers, losing_answers
from tests.support.bucket import Bucket

SMALL, LARGE = 10, PART_BYTES + 1
TEXT: dict[str, Any] = {"content_type": "text/plain", "metadata": {}}


def stores_an_object(method: str, path: str) -> bool:
    """A put of a whole object, or the end of a multipart upload."""
    is_object = path.count("/") > 1 and "probe" not in path
    return is_object and ((method == "PUT" and "partNumber" not in path) or (method == "POST" and "uploadId" in path))


@pytest.fixture
def lost(moto_endpoint: str) -> Iterator[LostAnswers]:
    with losing_answers(moto_endpoint, stores_an_object) as proxy:
        yield proxy


@pytest.fixture
async def store(lost: LostAnswers) -> AsyncIterator[ObjectStore]:
    opened = ObjectStore(settings_of(lost.url, "access", "secret-key", f"test-{secrets.token_hex(6)}"))
    await opened.open()
    await opened.ensure_bucket()
    assert await opened.probe()
    yield opened
    await opened.close()


@pytest.mark.parametrize("only_new", [True, False])
@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_an_upload_whose_answer_was_lost_has_stored_its_object(
    store: ObjectStore, lost: LostAnswers, size: int, only_new: bool
) -> None:
    async with store.upload("k", metadata={"work": "1"}, only_new=only_new) as upload:
        await upload.write(bytes(size))
        await upload.finish()
    assert lost.statuses[0] == 500
    stored = await store.head("k")
    assert stored is not None
    assert (stored.size, stored.metadata["work"]) == (size, "1")
    assert await store.abort_uploads("") == 0


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_an_upload_that_found_the_object_of_another_is_refused(store: ObjectStore, size: int) -> None:
    for data in (b"1", b"2"):
        async with store.upload("k", only_new=True) as upload:
            await upload.write(data * size)
            if data == b"1":
                await upload.finish()
            else:
                with pytest.raises(PutRefused):
                    await upload.finish()
    assert await store.read_head("k", 1) == b"1"


@pytest.mark.parametrize("in_parts", [False, True])
async def test_a_put_whose_answer_was_lost_has_stored_its_bytes(
    store: ObjectStore, lost: LostAnswers, in_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SINGLE_PUT_BYTES", 0 if in_parts else 1000)
    source = tmp_path / "source"
    source.write_bytes(b"mine")
    assert (await store.put("k", source, **TEXT)).size == 4
    assert lost.statuses[0] == 500
    with pytest.raises(ObjectExists):
        await store.put("k", b"another", **TEXT)


async def test_a_replacement_whose_answer_was_lost_has_replaced_the_leftover(
    store: ObjectStore, lost: LostAnswers
) -> None:
    await store._put_once("k", b"leftover", "text/plain", {})
    lost._lost.clear()
    judged: list[int] = []

    def is_leftover(there: store_module.Stored) -> bool:
        judged.append(there.size)
        return there.size == len(b"leftover")

    await store.put("k", b"mine", **TEXT, may_replace=is_leftover)
    assert (await store.read_head("k", 10), judged) == (b"mine", [8])


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_promotion_whose_answer_was_lost_is_its_own(store: ObjectStore, lost: LostAnswers, size: int) -> None:
    target = _Bucket(store, store, conditional=True)
    await store.put("source", bytes(size), **TEXT)
    lost._lost.clear()
    assert await target.create("acme/m", "source", size, "turn")
    assert lost.statuses[-2] == 500
    with pytest.raises(Conflict):
        await target.create("acme/m", "source", size, "another turn")
    await target.remove("acme/m", "turn")
    assert await store.head("acme/m") is None


async def test_the_end_of_an_upload_in_parts_may_be_repeated_though_the_store_knows_the_upload_no_more(
    s3: Bucket,
) -> None:
    """moto answers the repetition as the first request; rclone, as S3 after a while, with NoSuchUpload."""
    with losing_answers(s3.endpoint, stores_an_object) as proxy:
        store = ObjectStore(settings_of(proxy.url, s3.access_key, s3.secret_key, s3.bucket))
        await store.open()
        async with store.upload("k") as upload:
            await upload.write(bytes(LARGE))
            await upload.finish()
        assert proxy.statuses == [500, 404]
        stored = await store.head("k")
        assert stored is not None
        assert stored.size == LARGE
        await store.close()
