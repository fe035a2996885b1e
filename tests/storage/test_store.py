"""The object store's promises, on a store that honours conditional puts and on one that does not."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from prometheus_client import REGISTRY

from leasehold.api.fleet import health
from leasehold.api.fleet.health import Check, Readiness, _run_check
from leasehold.domain.errors import (
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
    StoreUnavailable,
)
from leasehold.domain.ids import id_of_instant
from leasehold.settings import Settings
from leasehold.storage import ObjectStore
from leasehold.storage.content import CHUNK
from leasehold.telemetry.outages import Outage
from tests.storage.conftest import settings_of

TEXT: dict[str, Any] = {"content_type": "text/plain", "metadata": {"work": "1"}}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def test_one_look_tells_the_size_and_the_first_bytes(store: ObjectStore) -> None:
    for data in (b"", b"few", b"0123456789" * 1000):
        await store.put(f"k{len(data)}", data, **TEXT)
        assert await store.size_and_head(f"k{len(data)}", 16) == (len(data), data[:16])
    with pytest.raises(ObjectMissing):
        await store.size_and_head("nothing", 16)


async def look_at_the_head(store: ObjectStore) -> None:
    assert await store.size_and_head("k", 16) == (5000, b"hello" * 3 + b"h")


async def take_the_first_piece(store: ObjectStore) -> None:
    async with aclosing(store.pieces("k")) as pieces:
        assert await anext(pieces)


async def take_the_first_of_a_list(store: ObjectStore) -> None:
    async with aclosing(store.list("")) as listed:
        assert (await anext(listed)).key == "k"


async def refuse_a_large_object(store: ObjectStore) -> None:
    with pytest.raises(ObjectTooLarge):
        await store.digest("k", max_bytes=5)


async def look_for_nothing(store: ObjectStore) -> None:
    assert await store.head("nothing") is None


@pytest.mark.parametrize(
    "use",
    [look_at_the_head, take_the_first_piece, take_the_first_of_a_list, refuse_a_large_object, look_for_nothing],
)
async def test_a_store_that_answers_is_back_also_for_a_reader_that_has_soon_read_enough(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, use: Callable[[ObjectStore], Awaitable[None]]
) -> None:
    await store.put("k", b"hello" * 1000, **TEXT)
    clock = iter([0.0, 10.0])  # the error, and the answer after it
    outage = Outage("object store", clock=lambda: next(clock))
    monkeypatch.setattr("leasehold.storage.s3.STORE", outage)
    outage.record_error(OSError(), "get")
    left = requests_left()
    await use(store)
    assert not outage.lasts
    assert requests_left() == left


def requests_left() -> float:
    """How many requests count as left: their callers were cancelled, or broke."""
    return counted(outcome="left")


def counted(**labels: str) -> float:
    """How many requests to stores have these labels."""
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    name = "leasehold_store_request_duration_seconds_count"
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


async def test_what_was_put_comes_back_with_its_metadata(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.write_bytes(b"hello" * 1000)
    put = await store.put("a/b.txt", source, **TEXT)
    assert (put.size, put.sha256) == (5000, sha256(b"hello" * 1000))
    there = await store.head("a/b.txt")
    assert there is not None
    assert (there.size, there.sha256, there.content_type, there.metadata["work"]) == (
        5000, put.sha256, "text/plain", "1",
    )  # fmt: skip
    got = await store.fetch_file("a/b.txt", tmp_path / "out", sha256=put.sha256)
    assert got.sha256 == put.sha256
    assert (tmp_path / "out").read_bytes() == source.read_bytes()
    assert await store.read_head("a/b.txt", 3) == b"hel"
    assert await store.read_head("a/b.txt", 9000) == source.read_bytes()


async def test_the_head_of_an_empty_object_is_empty(store: ObjectStore) -> None:
    await store.put("empty", b"", **TEXT)
    assert await store.read_head("empty", 256) == b""
    assert await store.fetch_bytes("empty", max_bytes=10) == b""


async def test_the_same_bytes_may_be_put_again_and_other_bytes_may_not(store: ObjectStore) -> None:
    first = await store.put("k", b"one", **TEXT)
    again = await store.put("k", b"one", **TEXT)
    assert again.sha256 == first.sha256
    with pytest.raises(ObjectExists):
        await store.put("k", b"two", **TEXT)
    assert await store.read_head("k", 10) == b"one"


async def test_a_leftover_is_replaced_only_while_the_lease_is_trusted(store: ObjectStore) -> None:
    await store.put("k", b"leftover", **TEXT)
    with pytest.raises(ObjectExists):
        await store.put("k", b"right", **TEXT, may_replace=lambda _there: False)
    await store.put("k", b"right", **TEXT, may_replace=lambda _there: True)
    assert await store.read_head("k", 10) == b"right"


async def test_ten_writers_of_the_same_bytes_all_succeed(store: ObjectStore) -> None:
    done = await asyncio.gather(*(store.put("k", b"same", **TEXT) for _ in range(10)))
    assert {stored.sha256 for stored in done} == {sha256(b"same")}


async def test_of_two_writers_of_other_bytes_exactly_one_wins_where_the_store_can_tell(store: ObjectStore) -> None:
    if not store.conditional:
        await store.put("k", b"one", **TEXT)
        with pytest.raises(ObjectExists):  # one after the other, at least
            await store.put("k", b"two", **TEXT)
        return
    results = await asyncio.gather(*(store.put("k", data, **TEXT) for data in (b"one", b"two")), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["ObjectExists", "Stored"]


async def test_what_is_not_there_is_missing_and_may_be_deleted(store: ObjectStore, tmp_path: Path) -> None:
    assert await store.head("nope") is None
    with pytest.raises(ObjectMissing):
        await store.fetch_file("nope", tmp_path / "x")
    with pytest.raises(ObjectMissing):
        await store.read_head("nope", 1)
    await store.delete("nope")
    assert not (tmp_path / "x").exists()


async def test_bytes_that_are_not_the_ones_stored_are_refused_and_not_left_on_disk(
    store: ObjectStore, tmp_path: Path
) -> None:
    await store.put("k", b"what is there", **TEXT)
    with pytest.raises(ObjectCorrupt):
        await store.fetch_file("k", tmp_path / "x", sha256=sha256(b"what was stored"))
    assert not (tmp_path / "x").exists()
    with pytest.raises(ObjectCorrupt):
        await store.fetch_bytes("k", sha256=sha256(b"what was stored"), max_bytes=100)
    with pytest.raises(ObjectTooLarge):
        await store.fetch_file("k", tmp_path / "x", max_bytes=12)
    assert not (tmp_path / "x").exists()
    with pytest.raises(ObjectTooLarge):
        await store.fetch_bytes("k", max_bytes=12)
    assert (await store.fetch_file("k", tmp_path / "x", max_bytes=13)).size == 13
    assert await store.fetch_bytes("k", sha256=sha256(b"what is there"), max_bytes=13) == b"what is there"


async def test_objects_are_listed_by_prefix_and_deleted(store: ObjectStore) -> None:
    for key in ("p/1", "p/2", "q/1"):
        await store.put(key, b"x", **TEXT)
    assert sorted([found.key async for found in store.list("p/")]) == ["p/1", "p/2"]
    await store.delete("p/1", "p/2")
    assert [found.key async for found in store.list("p/")] == []


async def test_a_large_file_goes_up_in_parts_and_comes_back_whole(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "big"
    with source.open("wb") as file:
        for _ in range(70):
            file.write(os.urandom(1024 * 1024))
    put = await store.put("big", source, **TEXT)
    got = await store.fetch_file("big", tmp_path / "copy")
    assert got.sha256 == put.sha256
    assert (await store.put("big", source, **TEXT)).sha256 == put.sha256


async def test_a_signed_url_admits_its_content_type_and_length_and_nothing_else(
    store: ObjectStore, store_settings: Settings
) -> None:
    url = store.sign_put("u", content_type="image/png", seconds=60, content_length=4)
    async with httpx2.AsyncClient(timeout=60) as client:
        if not store.conditional:  # moto does not check signatures
            for data, kind in ((b"1234", "image/jpeg"), (b"12345", "image/png")):
                assert (await client.put(url, content=data, headers={"Content-Type": kind})).status_code == 403
            assert await store.head("u") is None
        assert (await client.put(url, content=b"1234", headers={"Content-Type": "image/png"})).is_success
        assert (await client.get(store.sign_get("u", seconds=60))).content == b"1234"
    assert store_settings.s3_secret_key.get_secret_value() not in url


async def test_a_signed_url_for_something_new_overwrites_nothing_where_the_store_can_refuse(store: ObjectStore) -> None:
    url = store.sign_put("u", content_type="text/plain", seconds=60, content_length=4, only_new=True)
    headers = {"Content-Type": "text/plain"} | ({"If-None-Match": "*"} if await store.probe_once() else {})
    async with httpx2.AsyncClient(timeout=60) as client:
        answers = [(await client.put(url, content=data, headers=headers)).status_code for data in (b"1234", b"5678")]
    assert answers == [200, 412 if store.conditional else 200]
    assert await store.fetch_bytes("u", max_bytes=4) == (b"1234" if store.conditional else b"5678")


async def test_whether_a_store_can_refuse_is_asked_once(store_settings: Settings, store: ObjectStore) -> None:
    fresh = ObjectStore(store_settings)
    await fresh.open()
    puts: list[str] = []
    fresh._client.meta.events.register("before-send.s3.PutObject", lambda request, **_: puts.append(request.url))
    assert {await fresh.probe_once() for _ in range(3)} == {store.conditional}
    assert len(set(puts)) == 1  # each probe has a key of its own
    await fresh.close()
    for said in ("yes", "no"):
        told = ObjectStore(
            store_settings.model_copy(update={"s3_conditional_puts": said, "s3_endpoint": "http://[::1]:1"})
        )
        assert await told.probe_once() is (said == "yes")
        assert await told.probe() is (said == "yes")  # as a worker asks at its start


@pytest.mark.parametrize("size", [0, 1, 3 * 1024 * 1024 + 1])
async def test_a_digest_is_of_all_the_bytes_and_of_no_more_than_allowed(store: ObjectStore, size: int) -> None:
    data = os.urandom(size)
    await store.put("d", data, **TEXT)
    found = await store.digest("d", max_bytes=size)
    assert (found.size, found.sha256, found.content_type) == (size, hashlib.sha256(data).hexdigest(), "text/plain")
    if size:
        with pytest.raises(ObjectTooLarge):
            await store.digest("d", max_bytes=size - 1)
    with pytest.raises(ObjectMissing):
        await store.digest("nothing", max_bytes=1)


async def test_signed_urls_name_the_public_endpoint(store_settings: Settings) -> None:
    store = ObjectStore(store_settings.model_copy(update={"s3_public_endpoint": "https://files.example.com"}))
    await store.open()
    assert store.sign_get("k", seconds=60).startswith("https://files.example.com/")
    await store.close()


async def test_the_probe_finds_out_what_the_store_honours(store: ObjectStore, request: pytest.FixtureRequest) -> None:
    assert store.conditional is ("moto" in request.node.name)
    assert [found.key async for found in store.list("probe/")] == []


@asynccontextmanager
async def server(*answers: bytes | None, holds: bool = False) -> AsyncIterator[str]:
    """Accepts, and says one of `answers` to each request, or nothing: the last one to all further requests. `holds`: it
    leaves the end of each connection to the client.
    """
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline() not in (b"\r\n", b""):
            pass
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer is not None:
            writer.write(answer)
        if answer is None or holds:
            await reader.read()  # until the client gives up
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nContent-Type: text/plain\r\n\r\nonly this much"
BAD_SERVERS: dict[str, bytes | None] = {
    "says nothing": None,
    "answers 503": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n",
    "cuts the body": CUT,
}


@pytest.mark.parametrize("kind", BAD_SERVERS)
async def test_a_server_that_misbehaves_is_unavailable_and_leaves_no_file(kind: str, tmp_path: Path) -> None:
    async with server(BAD_SERVERS[kind]) as endpoint:
        store = ObjectStore(settings_of(endpoint, "access", "s3cr3t-canary", "bucket", s3_operation_timeout=1.0))
        await store.open()
        with pytest.raises(StoreUnavailable) as told:
            await store.fetch_file("k", tmp_path / "x")
        await store.close()
    assert "canary" not in str(told.value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("cuts", [1, 2, 3])
async def test_a_download_that_is_cut_twice_comes_whole_the_third_time(cuts: int, tmp_path: Path) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
    async with server(*[CUT] * cuts, whole) as endpoint:
        store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket"))
        await store.open()
        if cuts < 3:
            assert (await store.fetch_file("k", tmp_path / "x")).size == 5
            assert (tmp_path / "x").read_bytes() == b"whole"
        else:
            with pytest.raises(StoreUnavailable):
                await store.fetch_file("k", tmp_path / "x")
            assert not (tmp_path / "x").exists()
        await store.close()


async def test_what_a_failed_download_leaves_is_no_open_file(tmp_path: Path) -> None:
    """Though whoever keeps its error keeps what the download had in hand."""
    async with server(CUT) as endpoint:
        store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket"))
        await store.open()
        with pytest.raises(StoreUnavailable) as kept:
            await store.fetch_file("k", tmp_path / "x")
        await store.close()
    assert kept.value.__traceback__ is not None
    assert open_files_below(tmp_path) == []


def open_files_below(directory: Path) -> list[Path]:
    """The files that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [path for link in links if (path := link.readlink()).is_relative_to(directory)]


async def test_a_download_whose_file_somebody_has_removed_ends_with_the_error_of_the_store(tmp_path: Path) -> None:
    """The directory of an attempt that was given up goes while its downloads end."""
    path = tmp_path / "x"

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        path.unlink()
        writer.write(CUT)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        store = ObjectStore(settings_of(f"http://127.0.0.1:{port}", "access", "secret", "bucket"))
        await store.open()
        with pytest.raises(StoreUnavailable):
            await store.fetch_file("k", path)
        await store.close()


BEGUN = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (3 * CHUNK) + bytes(CHUNK)


async def read_the_beginning(store: ObjectStore, _path: Path) -> None:
    """The server sends the whole object, as a store without ranges does."""
    assert await store.read_head("k", CHUNK) == bytes(CHUNK)


async def download_too_much(store: ObjectStore, path: Path) -> None:
    with pytest.raises(ObjectTooLarge):
        await store.fetch_file("k", path, max_bytes=2 * CHUNK)


async def digest_too_much(store: ObjectStore, _path: Path) -> None:
    with pytest.raises(ObjectTooLarge):
        await store.digest("k", max_bytes=2 * CHUNK)


@pytest.mark.parametrize("use", [read_the_beginning, download_too_much, digest_too_much])
async def test_who_has_read_enough_waits_for_no_more_bytes(
    tmp_path: Path, use: Callable[[ObjectStore, Path], Awaitable[None]]
) -> None:
    """The first megabyte is enough for a reader of the beginning, and where the object is announced as too large."""
    async with server(BEGUN, holds=True) as endpoint, asyncio.timeout(20):
        store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket"))
        await store.open()
        await use(store, tmp_path / "x")
        await store.close()
    assert not (tmp_path / "x").exists()


async def test_a_store_that_falls_silent_in_the_middle_of_an_object_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ObjectStore, "_seconds_for", lambda _store, _size: 1.0)
    async with server(BEGUN, holds=True) as endpoint, asyncio.timeout(20):
        store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket"))
        await store.open()
        with pytest.raises(StoreUnavailable):
            await store.digest("k", max_bytes=3 * CHUNK)
        await store.close()


async def test_a_small_put_that_is_not_answered_ends_after_the_time_that_the_setting_allows() -> None:
    limits: dict[str, Any] = {"s3_operation_timeout": 0.5, "s3_conditional_puts": "yes"}  # no head before the put
    async with server(None) as endpoint, asyncio.timeout(20):
        store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket", **limits))
        await store.open()
        with pytest.raises(StoreUnavailable):
            await store.put("k", b"x", **TEXT)
        await store.close()


async def test_an_object_is_read_in_pieces_of_about_a_megabyte(store: ObjectStore) -> None:
    data = os.urandom(5 * CHUNK + 1)
    await store.put("k", data, **TEXT)
    pieces = [piece async for piece in store.pieces("k")]
    assert b"".join(pieces) == data
    assert max(map(len, pieces)) <= 2 * CHUNK
    assert min(map(len, pieces[:-1])) >= CHUNK


async def test_a_store_that_is_closed_keeps_no_connection() -> None:
    left = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        store = ObjectStore(settings_of(f"http://127.0.0.1:{port}", "access", "secret", "bucket"))
        await store.open()
        assert await store.head("k") is None
        assert not left.is_set()
        await store.close()
        async with asyncio.timeout(5):  # an idle connection ends by itself after fifteen seconds
            await left.wait()


def test_the_store_loads_nothing_that_only_a_type_checker_needs() -> None:
    """An installation has no such package."""
    code = "import sys; sys.modules['types_aiobotocore_s3'] = None; import leasehold.storage"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


async def test_the_time_of_a_slow_reader_does_not_count_as_the_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cancelled the reader: a handler, or a download over a slow line, got a CancelledError that nobody had sent."""
    pieces = 3
    body = bytes(pieces * CHUNK)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def received(seconds: float) -> int:
        monkeypatch.setattr(ObjectStore, "_seconds_for", lambda _store, _size: seconds)
        async with server(head + body) as endpoint:
            store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket"))
            await store.open()
            size = 0
            with suppress(StoreUnavailable):  # the store, or this process, stood still for the seconds
                async with aclosing(store.pieces("k")) as reading:
                    async for piece in reading:
                        size += len(piece)
                        await asyncio.sleep(1.2 * seconds if size == len(piece) else 0)
            await store.close()
        return size

    for seconds in (1.0, 4.0, 16.0):
        size = await received(seconds)
        if size == len(body):
            break
    assert size == len(body)


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    store = ObjectStore(settings_of("http://127.0.0.1:1", "access", "s3cr3t-canary", "bucket"))
    await store.open()
    for act in (store.head("k"), store.put("k", b"x", **TEXT), store.read_head("k", 1)):
        with pytest.raises(StoreUnavailable):
            await act
    await store.close()


async def test_wrong_credentials_are_an_error_that_tells_no_secret(s3: Any) -> None:
    store = ObjectStore(settings_of(s3.endpoint, s3.access_key, "wrong-canary", s3.bucket))
    await store.open()
    refused = counted(outcome="refused")
    with pytest.raises(StoreError) as told:
        await store.put("k", b"x", **TEXT)
    with pytest.raises(StoreError, match="refused the platform's credentials"):
        await store.check_answers(60.0)
    await store.close()
    assert "canary" not in str(told.value)
    assert counted(outcome="refused") == refused + 2


async def check_of_the_store(store: ObjectStore) -> Check:
    """What `/readyz` finds out about the store."""
    readiness = Readiness(cast("Any", SimpleNamespace(kinds=(), store=store, replica_reads=None)))
    return await _run_check("store", readiness._store, required=False)


@pytest.mark.usefixtures("patient_readiness")
async def test_a_store_that_answers_the_check_of_readiness_is_there_whatever_it_holds(store: ObjectStore) -> None:
    there = counted(operation="readiness", outcome="missing")
    assert await check_of_the_store(store) == Check("store", ok=True, required=False, detail="answers")
    await store.put("readiness", b"x", **TEXT)
    assert (await check_of_the_store(store)).ok
    assert counted(operation="readiness", outcome="missing") == there + 1


async def test_a_silent_store_counts_as_unavailable_and_not_as_left_by_those_who_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The alert must see it although every probe gives up long before a request does."""
    monkeypatch.setattr(health, "_TIMEOUT_SECONDS", 1.0)
    left, unavailable = requests_left(), counted(operation="readiness", outcome="unavailable")
    async with server(None) as endpoint:
        store = ObjectStore(settings_of(endpoint, "access", "secret", "bucket"))
        await store.open()
        assert await check_of_the_store(store) == Check("store", ok=False, required=False, detail="does not answer")
        await store.close()
    assert requests_left() == left
    assert counted(operation="readiness", outcome="unavailable") == unavailable + 1


GREEDY = """
import asyncio, resource, sys
from pathlib import Path
from leasehold.domain.ids import id_of_instant
from leasehold.storage import ObjectStore
from tests.storage.conftest import settings_of

async def main(endpoint, access, secret, bucket, folder):
    source = Path(folder) / "source"
    with source.open("wb") as file:
        for _ in range(200):
            file.write(bytes(1024 * 1024))
    store = ObjectStore(settings_of(endpoint, access, secret, bucket))
    await store.open()
    await store.put("warm", b"x", content_type="text/plain", metadata={})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await store.put("big", source, content_type="text/plain", metadata={})
    await store.fetch_file("big", Path(folder) / "copy")
    await store.close()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)

asyncio.run(main(*sys.argv[1:]))
"""


def test_two_hundred_megabytes_pass_through_a_small_memory(s3: Any, tmp_path: Path) -> None:
    arguments = [s3.endpoint, s3.access_key, s3.secret_key, s3.bucket, str(tmp_path)]
    root = Path(__file__).parents[2]
    said = subprocess.run(
        [sys.executable, "-c", GREEDY, *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=250
    )
    assert int(said.stdout) < 80  # MB, of 200: two parts of 16 MiB, and what the HTTP client keeps of them


async def test_what_a_dead_probe_left_is_deleted_after_a_while(store: ObjectStore) -> None:
    now = datetime.now(UTC)
    old, young = [f"probe/{id_of_instant(instant)}" for instant in (now - timedelta(hours=2), now)]
    for key in (old, young):
        await store.put(key, b"1", content_type="text/plain", metadata={})
    await store.delete_old_probes(timedelta(hours=1))
    assert [found.key async for found in store.list("probe/")] == [young]
