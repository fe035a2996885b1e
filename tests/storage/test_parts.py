"""What the store's client is asked for: one request for a small object, parts for a large one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leasehold.storage import ObjectStore, multipart
from leasehold.storage.multipart import put_in_parts
from leasehold.storage.streaming import Upload
from tests.storage.conftest import settings_of

MIB = 1024 * 1024
SECONDS = 30.0
BEGIN, PART, COMPLETE, ABORT, PUT = "begin", "part", "complete", "abort", "put"


class Client:
    """In the place of the S3 client. `asked`: each request: its kind, its number if it sends a part, the bytes that it
    sends, and its condition. `may_answer`: while it is not set, no part is answered. `has_two`: two parts have come.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, str | None]] = []
        self.completed: list[Any] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_two = asyncio.Event()
        self.ended: list[str] = []  # in this order

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The number and the size of each part."""
        return sorted((number, size) for kind, number, size, _ in self.asked if kind == PART)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.asked]

    def _note(self, kind: str, request: dict[str, Any]) -> None:
        body = request.get("Body", b"")
        self.asked.append((kind, request.get("PartNumber", 0), len(body), request.get("IfNoneMatch")))

    async def put_object(self, **request: Any) -> dict[str, Any]:
        self._note(PUT, request)
        return {"ETag": "of a put"}

    async def create_multipart_upload(self, **request: Any) -> dict[str, Any]:
        self._note(BEGIN, request)
        return {"UploadId": "u"}

    async def upload_part(self, **request: Any) -> dict[str, Any]:
        self._note(PART, request)
        if len(self.parts) == 2:
            self.has_two.set()
        try:
            await self.may_answer.wait()
        finally:
            self.ended.append(PART)
        return {"ETag": f"of part {request['PartNumber']}"}

    async def complete_multipart_upload(self, **request: Any) -> dict[str, Any]:
        self._note(COMPLETE, request)
        self.completed = request["MultipartUpload"]["Parts"]
        return {"ETag": "of all parts"}

    async def abort_multipart_upload(self, **request: Any) -> dict[str, Any]:
        self._note(ABORT, request)
        self.ended.append(ABORT)
        return {}


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def store(client: Client) -> ObjectStore:
    """A store that honours conditional puts."""
    opened = ObjectStore(settings_of("http://127.0.0.1:1", "access", "secret", "bucket", s3_conditional_puts="yes"))
    vars(opened)["_client"] = client
    return opened


def upload_by(client: Any, **options: Any) -> Upload:
    attributes = {"ContentType": "text/plain", "Metadata": {}}
    return Upload(client, "bucket", "k", attributes, lambda _size: asyncio.timeout(SECONDS), **options)


@pytest.mark.parametrize(("extra", "parts"), [(0, []), (1, [*((number, 16 * MIB) for number in (1, 2, 3, 4)), (5, 1)])])
async def test_a_file_of_up_to_64_mib_goes_up_in_one_request_and_a_larger_one_in_parts_of_16_mib(
    store: ObjectStore, client: Client, tmp_path: Path, extra: int, parts: list[tuple[int, int]]
) -> None:
    """They bound the memory of each put. S3 numbers the parts from 1 to 10,000."""
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.truncate(64 * MIB + extra)
    put = await store.put("k", source, content_type="text/plain", metadata={})
    assert put.size == 64 * MIB + extra
    assert client.parts == parts
    if parts:
        assert client.kinds == [BEGIN, *[PART] * len(parts), COMPLETE]
        assert client.completed == [{"PartNumber": n, "ETag": f"of part {n}"} for n, _ in parts]
        assert put.etag == "of all parts"
    else:
        assert client.asked == [(PUT, 0, 64 * MIB, "*")]
        assert put.etag == "of a put"


async def test_at_most_two_parts_of_a_file_are_in_memory_at_once(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(multipart, "PART_BYTES", 1)
    monkeypatch.setattr(asyncio, "to_thread", at_once)  # so that no read ends later than those of the first two parts
    (source := tmp_path / "source").write_bytes(b"12345")
    client.may_answer.clear()
    async with asyncio.timeout(SECONDS):
        putting = asyncio.create_task(put_in_parts(client, "bucket", "k", source, 5, "text/plain", {}))
        await client.has_two.wait()
        assert client.parts == [(1, 1), (2, 1)]
        client.may_answer.set()
        assert await putting == "of all parts"
    assert client.parts == [(number, 1) for number in (1, 2, 3, 4, 5)]


async def test_pieces_go_up_in_parts_of_5_mib_and_the_finished_upload_is_left_alone(client: Client) -> None:
    """S3 takes no smaller part but the last, and at most two parts of an upload are in memory."""
    async with upload_by(client) as upload:
        for _ in range(11):
            await upload.write(bytes(MIB))
        assert (await upload.finish()).size == 11 * MIB
    assert client.parts == [(1, 5 * MIB), (2, 5 * MIB), (3, MIB)]
    assert client.completed == [{"PartNumber": n, "ETag": f"of part {n}"} for n in (1, 2, 3)]
    assert client.kinds == [BEGIN, PART, PART, PART, COMPLETE]


async def test_only_an_upload_that_may_but_create_sends_a_condition(store: ObjectStore, client: Client) -> None:
    uploads = [upload_by(client), upload_by(client, only_new=True), store.upload("k"), store.upload("k", only_new=True)]
    for size in (1, 5 * MIB):
        client.asked.clear()
        for upload in uploads if size == 1 else [upload_by(client), store.upload("k", only_new=True)]:
            async with upload:
                await upload.write(bytes(size))
                await upload.finish()
        conditions = [condition for kind, _, _, condition in client.asked if kind in (PUT, COMPLETE)]
        assert conditions == ([None, "*", None, "*"] if size == 1 else [None, "*"])


async def test_an_upload_that_is_left_first_stops_the_part_that_is_on_its_way_and_then_drops_all_parts(
    client: Client,
) -> None:
    """A part that arrived after the end of its upload would stay in the store."""
    client.may_answer.clear()

    async def leave() -> None:
        async with upload_by(client) as upload:
            await upload.write(bytes(5 * MIB))
            while PART not in client.kinds:
                await asyncio.sleep(0)
            raise KeyError

    async with asyncio.timeout(SECONDS):
        with pytest.raises(KeyError):
            await leave()
    assert client.ended == [PART, ABORT]
