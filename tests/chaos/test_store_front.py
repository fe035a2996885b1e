"""The store's front: it refuses to overwrite as S3 does, and makes the trouble that it is told to make."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr

from chaos.store_front import StoreFront, Trouble
from leasehold.domain.errors import ObjectExists, StoreUnavailable
from leasehold.embedded.s3 import S3
from leasehold.settings import Settings
from leasehold.storage.store import SINGLE_PUT_BYTES, ObjectStore, Stored


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
        )
    )
    await store.open()
    yield store
    await store.close()


@contextmanager
def impatient(store: ObjectStore) -> Iterator[None]:
    """In the block, for what is waited out, an operation has two seconds. Else it has a minute on a busy machine."""
    settings = store._settings
    store._settings = settings.model_copy(update={"s3_operation_timeout": 2.0})
    try:
        yield
    finally:
        store._settings = settings


async def put(store: ObjectStore, key: str, data: bytes) -> None:
    await store.put(key, data, content_type="text/plain", metadata={})


async def test_an_upload_in_parts_does_not_overwrite_either(store: ObjectStore, tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(SINGLE_PUT_BYTES + 1)
    await put(store, "large", b"first")
    with pytest.raises(ObjectExists):
        await store.put("large", large, content_type="text/plain", metadata={})
    assert await store.fetch_bytes("large", max_bytes=100) == b"first"


async def test_an_upload_is_excused_only_if_its_worker_never_got_its_id(
    store: ObjectStore, front: StoreFront, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(SINGLE_PUT_BYTES + 1)
    await store.put("answered", large, content_type="text/plain", metadata={})
    now = time.time()
    front.excuse_cut([(now - 900, now - 600), (now + 600, now + 900)])
    assert front.faults.excused == set()  # no link was cut as it went up
    front.excuse_cut([(now - 600, now + 600)])
    assert len(front.faults.excused) == 1
    front.faults.excused.clear()
    front.faults.begin(Trouble.MUTE, share=1.0)
    with impatient(store), pytest.raises(StoreUnavailable):
        await store.put("mute", large, content_type="text/plain", metadata={})
    front.faults.heal()
    assert await store.abort_uploads("mute") == len(front.faults.excused) > 0


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
    with impatient(store), pytest.raises(StoreUnavailable):
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


async def raw_put(store: ObjectStore, key: str, data: bytes, **condition: str) -> int:
    """One try of a put that must create; returns the status of the answer."""
    client = store._client
    try:
        answer = await client.put_object(Bucket=store._bucket, Key=key, Body=data, **condition)  # type: ignore[arg-type]  # a condition's text
    except client.exceptions.ClientError as error:
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    return int(answer["ResponseMetadata"]["HTTPStatusCode"])


@pytest.mark.parametrize("trouble", [Trouble.LATE, Trouble.MUTE, Trouble.DENY])
async def test_a_store_may_have_written_what_it_says_that_it_has_not(
    store: ObjectStore, front: StoreFront, server: S3, trouble: Trouble
) -> None:
    await store.probe()
    key = f"written-{trouble}"
    front.faults.begin(trouble, 1.0)
    stored = await store.put(key, b"done", content_type="text/plain", metadata={})  # told in the end: it is there
    assert front.faults.fired > 0
    assert (server.directory / "buckets" / store._bucket / key).read_bytes() == b"done"
    assert stored.size == 4
    front.faults.heal()
    assert await store.fetch_bytes(key, max_bytes=100) == b"done"


async def test_a_put_that_was_denied_after_it_was_done_is_no_others(store: ObjectStore, front: StoreFront) -> None:
    """Equal bytes are there: that is success, whoever wrote them."""
    await store.probe()
    front.faults.begin(Trouble.DENY, 1.0)
    await put(store, "denied", b"mine")
    front.faults.heal()
    with pytest.raises(ObjectExists):
        await put(store, "denied", b"another")


async def test_a_store_that_lies_about_create_only_replaces_what_is_there_and_is_noted(
    store: ObjectStore, front: StoreFront
) -> None:
    await store.probe()
    await put(store, "jobs/lied", b"first")
    assert front.faults.overwritten == set()
    front.faults.begin(Trouble.OVERWRITE, 1.0)
    assert await raw_put(store, "jobs/lied", b"second", IfNoneMatch="*") == 200
    assert front.faults.overwritten == {"jobs/lied"}
    assert front.faults.fired == 1
    front.faults.heal()
    assert await store.fetch_bytes("jobs/lied", max_bytes=100) == b"second"
    assert await raw_put(store, "jobs/lied", b"third", IfNoneMatch="*") == 412


async def test_the_lie_has_something_to_overwrite_because_the_first_put_seems_to_fail(
    store: ObjectStore, front: StoreFront
) -> None:
    await store.probe()
    front.faults.begin(Trouble.OVERWRITE, 1.0)
    await put(store, "jobs/again", b"same")
    assert front.faults.overwritten == {"jobs/again"}
    front.faults.heal()
    assert await store.fetch_bytes("jobs/again", max_bytes=100) == b"same"


async def test_a_probe_is_answered_truly(store: ObjectStore, front: StoreFront) -> None:
    front.faults.begin(Trouble.OVERWRITE, 1.0)
    assert await store.probe()
    assert front.faults.overwritten == set()


async def test_trouble_that_met_nothing_it_could_break_has_not_happened(store: ObjectStore, front: StoreFront) -> None:
    front.faults.begin(Trouble.CUT, 1.0)
    await put(store, "no-body", b"x")  # the answer to a put has no body that could be cut
    front.faults.begin(Trouble.MUTE, 1.0)
    assert await store.head("no-body") is not None
    assert front.faults.fired == 0


async def test_a_replacement_on_its_way_replaces_nothing_that_came_meanwhile(
    store: ObjectStore, front: StoreFront
) -> None:
    """It looks again: the object that it was allowed to replace is not there any more."""
    await store.probe()
    await put(store, "turns", b"first")
    asked: list[str | None] = []

    def may_replace(there: Stored) -> bool:
        asked.append(there.etag)
        front.faults.hold_put = "" if len(asked) > 1 else "turns"
        return True

    late = asyncio.create_task(
        store.put("turns", b"late", content_type="text/plain", metadata={}, may_replace=may_replace)
    )
    await front.faults.held.wait()
    await store.put("turns", b"other", content_type="text/plain", metadata={}, may_replace=lambda _there: True)
    front.faults.released.set()
    await late
    assert len(set(asked)) == 2
    assert await store.fetch_bytes("turns", max_bytes=100) == b"late"
