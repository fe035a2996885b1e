"""A tenant moves between cells with a bucket each while clients upload: no object is lost, and none is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import typer

from leasehold.cli import moving
from leasehold.cli.moving import abort, clean, move_tenant, state_of_move
from leasehold.cli.running import UNREACHABLE, run_or_exit
from leasehold.domain.errors import Conflict, NotFound, StoreUnavailable
from leasehold.storage import ObjectStore
from leasehold.storage.streaming import PART_BYTES
from tests.api.conftest import client_of
from tests.api.media_api import JPEG, MediaApi, put
from tests.cells.conftest import Cell, Two
from tests.cells.test_all_that_moves import acme, full_key
from tests.cells.test_move import MOVE, moved, rows_of, settings_of, submit
from tests.support.bucket import Bucket

if TYPE_CHECKING:
    from types_aiobotocore_s3 import S3Client

LARGE = bytes(range(256)) * (2 * PART_BYTES // 256) + b"and more"


@pytest.fixture
async def bucket_of_b(s3_server: Bucket, s3_client: S3Client) -> AsyncIterator[Bucket]:
    bucket = await s3_server.fresh(s3_client)
    yield bucket
    await bucket.delete(s3_client)


@pytest.fixture
def settings_of_b(bucket_of_b: Bucket) -> dict[str, Any]:
    return {"s3_bucket": bucket_of_b.bucket}


@asynccontextmanager
async def stores_of(two: Two) -> AsyncIterator[tuple[ObjectStore, ObjectStore]]:
    async with AsyncExitStack() as stack:
        stores = ObjectStore.from_settings(settings_of(two.a)), ObjectStore.from_settings(settings_of(two.b))
        for store in stores:
            await store.open()
            stack.push_async_callback(store.close)
        yield stores


async def keys_in(store: ObjectStore) -> set[str]:
    return {stored.key async for stored in store.list("")}


async def parts_in(store: ObjectStore, client: S3Client) -> list[str]:
    """The keys of multipart uploads that are open."""
    answer = await client.list_multipart_uploads(Bucket=store._bucket)
    return [upload["Key"] for upload in answer.get("Uploads", [])]


async def end_urls(cell: Cell) -> None:
    """Time passes until the cell's URLs take no uploads."""
    async with rows_of(cell) as rows:
        await rows.execute("ALTER TABLE upload DISABLE TRIGGER USER")
        await rows.execute("UPDATE upload SET writable_until = writable_until - interval '2 days'")
        await rows.execute("ALTER TABLE upload ENABLE TRIGGER USER")


async def test_uploads_of_each_state_are_completed_in_the_new_cell(two: Two) -> None:
    key = await full_key(two.a)
    async with acme(two.a, key) as old:
        api = MediaApi(old.http)
        sent = await api.upload()
        late, later, never = [await api.ticket() for _ in range(3)]
    others = await submit(two.a.running.url, await two.a.key("other"))
    async with stores_of(two) as (a, b):
        await a.put(f"jobs/{others}/only/x", b"x", content_type="text/plain", metadata={})
        assert (await moved(two))["objects"] == 1
        two.place(acme="b")
        async with acme(two.b, key) as new:
            api = MediaApi(new.http)
            assert (await api.complete(sent)).status_code == 202
            assert (await put(late.upload_url, JPEG + b"late", "image/jpeg")).status_code == 200
            refused = await api.complete(late)
            assert (refused.status_code, refused.json()["code"]) == (409, "upload_missing")
            assert (await moved(two))["objects"] == 1  # the command once more brings what came late
            assert await b.fetch_bytes(late.original_key, max_bytes=1000) == JPEG + b"late"
            assert (await api.complete(late)).status_code == 202
            with pytest.raises(Conflict, match="may still send 4 uploads of acme to cell a") as open_still:
                await clean(settings_of(two.a), settings_of(two.b), MOVE)
            assert open_still.value.code == "uploads_open"
            assert sent.original_key in await keys_in(a)
            assert (await put(later.upload_url, JPEG + b"later", "image/jpeg")).status_code == 200
            await end_urls(two.a)
            assert (await clean(settings_of(two.a), settings_of(two.b), MOVE))["objects"] == 1
            assert (await api.complete(later)).status_code == 202
            assert (await api.complete(never)).json()["code"] == "upload_missing"
        assert await b.fetch_bytes(later.original_key, max_bytes=1000) == JPEG + b"later"
        assert await keys_in(a) == {f"jobs/{others}/only/x"}
        assert await keys_in(b) == {sent.original_key, late.original_key, later.original_key}


async def test_what_the_new_store_has_got_by_itself_is_not_replaced_from_the_old(two: Two) -> None:
    key = await full_key(two.a)
    async with acme(two.a, key) as old:
        ticket = await MediaApi(old.http).ticket()
    async with stores_of(two) as (a, b):
        await moved(two)
        await a.put(ticket.original_key, b"old", content_type="image/jpeg", metadata={})
        await b.put(ticket.original_key, b"new", content_type="image/jpeg", metadata={})
        assert (await moved(two))["objects"] == 0
        assert await b.fetch_bytes(ticket.original_key, max_bytes=9) == b"new"


async def test_a_large_object_arrives_whole_although_its_first_copy_was_cut_off(
    two: Two, s3_client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submit(two.a.running.url, await two.a.key())
    name = f"jobs/{job}/only/large"
    async with stores_of(two) as (a, b):
        async with a.upload(name) as upload:  # without a digest, as clients' uploads are
            await upload.write(LARGE)
            await upload.finish()
        pieces = ObjectStore.pieces

        async def cut_off(store: ObjectStore, key: str) -> AsyncIterator[bytes]:
            size = 0
            async for piece in pieces(store, key):
                yield piece
                if (size := size + len(piece)) > PART_BYTES:
                    raise ConnectionResetError

        with monkeypatch.context() as patch:
            patch.setattr(ObjectStore, "pieces", cut_off)
            with pytest.raises(ConnectionResetError):
                await moved(two)
        assert await keys_in(b) == set()
        assert (await moved(two))["objects"] == 1
        assert await b.fetch_bytes(name, max_bytes=len(LARGE)) == LARGE
        await clean(settings_of(two.a), settings_of(two.b), MOVE)
        assert (await keys_in(a), await parts_in(a, s3_client), await parts_in(b, s3_client)) == (set(), [], [])


async def test_an_object_that_a_client_replaces_while_it_is_copied_is_copied_again(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await full_key(two.a)
    async with acme(two.a, key) as old:
        ticket = await MediaApi(old.http).upload()
    pieces = ObjectStore.pieces

    async def replaced(store: ObjectStore, name: str) -> AsyncIterator[bytes]:
        async for piece in pieces(store, name):
            yield piece
        assert (await put(ticket.upload_url, JPEG[::-1], "image/jpeg")).status_code == 200

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "pieces", replaced)
        with pytest.raises(Conflict, match="has changed meanwhile"):
            await moved(two)
    await moved(two)
    async with stores_of(two) as (_, b):
        assert await b.fetch_bytes(ticket.original_key, max_bytes=1000) == JPEG[::-1]


async def test_a_store_that_is_away_while_objects_are_copied_ends_the_command_with_the_status_of_a_silent_server(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await submit(two.a.running.url, await two.a.key())
    async with stores_of(two) as (a, _):
        for name in "xyz":
            await a.put(f"jobs/{job}/only/{name}", b"x", content_type="text/plain", metadata={})
    copies = Counter[str]()

    async def away(_: ObjectStore, name: str) -> AsyncIterator[bytes]:
        copies["begun"] += 1
        try:
            if copies["begun"] < 3:
                await asyncio.sleep(60)
                yield b""
            raise StoreUnavailable("the store is away")
        finally:
            copies["ended"] += 1

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "pieces", away)
        with pytest.raises(typer.Exit) as ended:
            await asyncio.to_thread(run_or_exit, moved(two))
    assert ended.value.exit_code == UNREACHABLE
    assert copies == {"begun": 3, "ended": 3}  # no copy goes on without the command
    assert (await moved(two))["objects"] == 3


async def test_an_aborted_move_leaves_nothing_in_the_new_store(
    two: Two, s3_client: S3Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await full_key(two.a)
    async with acme(two.a, key) as old:
        ticket = await MediaApi(old.http).upload()

        async def stopped(*_: Any) -> None:
            raise ConnectionResetError

        with monkeypatch.context() as patch:
            patch.setattr(moving, "_switch", stopped)
            with pytest.raises(ConnectionResetError):
                await moved(two)
        async with stores_of(two) as (a, b):
            bucket = settings_of(two.b).s3_bucket
            # As a command leaves it that was killed while it copied.
            await s3_client.create_multipart_upload(Bucket=bucket, Key=ticket.original_key)
            assert ticket.original_key in await keys_in(b)
            await abort(settings_of(two.a), settings_of(two.b), MOVE)
            assert (await keys_in(b), await parts_in(b, s3_client)) == (set(), [])
            assert ticket.original_key in await keys_in(a)
        assert (await MediaApi(old.http).complete(ticket)).status_code == 202


async def test_a_store_that_takes_no_objects_is_refused_before_anything_changes(two: Two) -> None:
    key = await two.a.key()
    await submit(two.a.running.url, key)
    a, b = settings_of(two.a), settings_of(two.b)
    for wrong in ({"s3_bucket": "no-such-bucket"}, {"object_store": "none"}, {"s3_endpoint": "http://127.0.0.1:9"}):
        with pytest.raises(Conflict, match="store of the other cell takes no objects") as refused:
            await move_tenant(a, b.model_copy(update=wrong), MOVE)
        assert refused.value.code == "target_store"
        with pytest.raises(NotFound, match="No move"):
            await state_of_move(a, "acme")
    await submit(two.a.running.url, key)  # nothing holds the tenant


async def test_a_form_that_arrives_during_the_whole_move_is_refused_and_leaves_nothing(
    two: Two, s3_client: S3Client
) -> None:
    """A form of a conversion is received for up to 50 minutes, in a multipart upload to the old store."""
    key = await full_key(two.a)
    goes_on, arrives = asyncio.Event(), asyncio.Event()

    async def form() -> AsyncIterator[bytes]:
        for name, value in {"user_id": "u", "model_id": "1", "version": "0001", "platform": "520"}.items():
            yield f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        yield b'--x\r\nContent-Disposition: form-data; name="model"; filename="m.onnx"\r\n\r\n' + LARGE
        arrives.set()
        await goes_on.wait()
        yield b"\r\n--x--\r\n"

    async def send(cell: Cell) -> httpx2.Response:
        async with client_of(cell.running.url, key) as client:
            content_type = {"Content-Type": "multipart/form-data; boundary=x"}
            return await client.post("/api/v1/jobs", content=form(), headers=content_type)

    async with stores_of(two) as (a, b):
        sending = asyncio.create_task(send(two.a))
        await arrives.wait()
        async with asyncio.timeout(60):
            while not await parts_in(a, s3_client):
                await asyncio.sleep(0.05)
        await moved(two)
        two.place(acme="b")
        with pytest.raises(Conflict, match="may still send 1 upload of"):
            await clean(settings_of(two.a), settings_of(two.b), MOVE)
        goes_on.set()
        answer = await sending
        assert (answer.status_code, answer.json()["code"]) == (503, "tenant_moving"), answer.text
        assert int(answer.headers["retry-after"]) > 0
        again = await send(two.b)
        assert again.status_code == 201, again.text
        await end_urls(two.a)
        await clean(settings_of(two.a), settings_of(two.b), MOVE)
        assert (await keys_in(a), await parts_in(a, s3_client)) == (set(), [])
        assert await b.fetch_bytes(f"jobs/{again.json()['job_id']}/input/model", max_bytes=len(LARGE)) == LARGE
