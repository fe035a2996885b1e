"""The store's front: it refuses to overwrite as S3 does, and makes the trouble that it is told to make."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from chaos.store_front import StoreFront, Trouble
from leasehold.domain.errors import ObjectExists, StoreUnavailable
from leasehold.embedded.s3 import S3
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore


@pytest.fixture(scope="module")
async def server(run_directory: Path) -> AsyncIterator[S3]:
    server = S3(run_directory / "chaos-s3")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def front(server: S3) -> AsyncIterator[StoreFront]:
    front = StoreFront(server)
    await front.open(["one", "two"])
    yield front
    await front.close()


@pytest.fixture
async def store(server: S3, front: StoreFront) -> AsyncIterator[ObjectStore]:
    store = ObjectStore.from_settings(
        Settings(
            _env_file=None,
            s3_endpoint=f"http://127.0.0.1:{front.ports['one']}",
            s3_access_key=SecretStr(server.access_key),
            s3_secret_key=SecretStr(server.secret_key),
            s3_operation_timeout=2.0,
        )
    )
    await store.open()
    yield store
    await store.close()


async def put(store: ObjectStore, key: str, data: bytes) -> None:
    await store.put(key, data, content_type="text/plain", metadata={})


async def test_a_put_that_must_create_does_not_overwrite(store: ObjectStore) -> None:
    assert await store.probe()
    await put(store, "kept", b"first")
    with pytest.raises(ObjectExists):
        await put(store, "kept", b"second")
    assert await store.fetch_bytes("kept", max_bytes=100) == b"first"


async def test_a_put_may_replace_exactly_what_it_saw(store: ObjectStore) -> None:
    await store.probe()
    await put(store, "replaced", b"first")
    await store.put("replaced", b"second", content_type="text/plain", metadata={}, may_replace=lambda _there: True)
    assert await store.fetch_bytes("replaced", max_bytes=100) == b"second"


async def test_a_put_that_was_held_arrives_late_and_finds_the_place_taken(
    store: ObjectStore, front: StoreFront
) -> None:
    await store.probe()
    front.faults.hold_put = "late"
    late = asyncio.create_task(put(store, "late", b"first to be sent"))
    await front.faults.held.wait()
    assert front.faults.held_of == "one"
    await put(store, "late", b"first to arrive")
    front.faults.released.set()
    with pytest.raises(ObjectExists):
        await late
    assert await store.fetch_bytes("late", max_bytes=100) == b"first to arrive"


@pytest.mark.parametrize("trouble", [Trouble.ERROR, Trouble.CUT, Trouble.HANG])
async def test_trouble_of_the_store_is_an_error_of_the_store_and_is_counted(
    store: ObjectStore, front: StoreFront, trouble: Trouble
) -> None:
    await put(store, f"wanted-{trouble}", b"x" * 20_000)
    front.faults.begin(trouble, 1.0)
    with pytest.raises(StoreUnavailable):
        await store.fetch_bytes(f"wanted-{trouble}", max_bytes=100_000)
    assert front.faults.fired > 0
    front.faults.heal()
    assert len(await store.fetch_bytes(f"wanted-{trouble}", max_bytes=100_000)) == 20_000


async def test_a_corrupt_byte_is_made_of_what_steps_wrote_and_never_of_an_original(
    store: ObjectStore, front: StoreFront
) -> None:
    await put(store, "jobs/made.txt", b"made")
    await put(store, "media/original.jpg", b"sent")
    front.faults.begin(Trouble.CORRUPT, 1.0)
    assert await store.fetch_bytes("jobs/made.txt", max_bytes=100) != b"made"
    assert await store.fetch_bytes("media/original.jpg", max_bytes=100) == b"sent"
    front.faults.heal()
