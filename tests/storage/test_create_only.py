"""Create-only, on each of the ways to write: one request, several parts, piece by piece. And two writers at once.

The store honours conditional puts here: `test_store.py` has what holds on any store.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from botocore.exceptions import ClientError

from leasehold.domain.errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from leasehold.storage import ObjectStore, s3
from leasehold.storage import store as store_module
from leasehold.storage.content import digest_of_bytes
from leasehold.storage.s3 import PutRefused, request
from leasehold.storage.store import Stored
from leasehold.storage.streaming import PART_BYTES
from tests.storage.conftest import settings_of

TEXT: dict[str, Any] = {"content_type": "text/plain", "metadata": {}}
WHOLE, IN_PARTS = "in one request", "in parts"


@pytest.fixture
async def refusing(moto_endpoint: str) -> AsyncIterator[ObjectStore]:
    opened = ObjectStore(settings_of(moto_endpoint, "access", "secret-key", f"test-{secrets.token_hex(6)}"))
    await opened.open()
    await opened.ensure_bucket()
    assert await opened.probe()
    yield opened
    await opened.close()


@pytest.fixture(params=[WHOLE, IN_PARTS])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], Path]:
    """A file with these bytes, which is stored the one way or the other."""
    monkeypatch.setattr(store_module, "SINGLE_PUT_BYTES", 1000 if request.param == WHOLE else 0)

    def write(data: bytes) -> Path:
        path = tmp_path / secrets.token_hex(4)
        path.write_bytes(data)
        return path

    return write


def interrupt(monkeypatch: pytest.MonkeyPatch, store: ObjectStore, *acts: Callable[[], Awaitable[object]]) -> None:
    """Between each of the next HEADs and the put that follows it, one of `acts` happens."""
    head, left = store.head, list(acts)

    async def and_then(key: str) -> Stored | None:
        found = await head(key)
        if left:
            await left.pop(0)()
        return found

    monkeypatch.setattr(store, "head", and_then)


async def test_a_file_overwrites_nothing_and_no_part_of_it_stays(
    refusing: ObjectStore, source: Callable[[bytes], Path]
) -> None:
    await refusing.put("k", b"first", **TEXT)
    with pytest.raises(ObjectExists):
        await refusing.put("k", source(b"second"), **TEXT)
    assert await refusing.read_head("k", 10) == b"first"
    assert await refusing.abort_uploads("") == 0
    assert (await refusing.put("k", source(b"first"), **TEXT)).size == 5


async def test_a_leftover_that_another_writer_replaced_meanwhile_is_judged_anew(
    refusing: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts both found the leftover. The first to replace it has it, unless the rule says otherwise again."""
    mine, theirs = b"mine", b"theirs"
    await refusing.put("k", b"leftover", **TEXT)
    judged: list[int] = []

    def only_the_leftover(there: Stored) -> bool:
        judged.append(there.size)
        return there.size == len(b"leftover")

    interrupt(monkeypatch, refusing, lambda: refusing.put("k", theirs, **TEXT, may_replace=lambda _there: True))
    with pytest.raises(ObjectExists):
        await refusing.put("k", mine, **TEXT, may_replace=only_the_leftover)
    assert judged == [len(b"leftover"), len(b"theirs")]
    assert await refusing.read_head("k", 10) == b"theirs"


async def test_a_leftover_that_is_deleted_meanwhile_is_no_obstacle(
    refusing: ObjectStore, source: Callable[[bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    await refusing.put("k", b"leftover", **TEXT)
    interrupt(monkeypatch, refusing, lambda: refusing.delete("k"))
    await refusing.put("k", source(b"mine"), **TEXT, may_replace=lambda _there: True)
    assert await refusing.read_head("k", 10) == b"mine"


async def test_what_was_created_where_a_leftover_had_been_is_not_overwritten(
    refusing: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await refusing.put("k", b"leftover", **TEXT)
    theirs = refusing._put_once
    interrupt(monkeypatch, refusing, lambda: refusing.delete("k"), lambda: theirs("k", b"theirs", "text/plain", {}))
    with pytest.raises(ObjectExists):
        await refusing.put("k", b"mine", **TEXT, may_replace=lambda there: there.size == len(b"leftover"))
    assert await refusing.read_head("k", 10) == b"theirs"


async def test_while_others_keep_replacing_an_object_nothing_is_said_to_be_stored(
    refusing: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await refusing.put("k", b"leftover", **TEXT)
    theirs = [b"theirs %d" % number for number in range(store_module._MAX_PUTS)]
    interrupt(monkeypatch, refusing, *(partial(refusing._put_once, "k", data, "text/plain", {}) for data in theirs))
    with pytest.raises(StoreUnavailable):
        await refusing.put("k", b"mine", **TEXT, may_replace=lambda _there: True)
    assert await refusing.read_head("k", 10) == theirs[-1]


async def test_what_replaces_a_leftover_in_parts_names_the_object_that_it_replaces(
    refusing: ObjectStore, source: Callable[[bytes], Path]
) -> None:
    """The header is what is judged here: moto does not honour `If-Match` at the end of a multipart upload."""
    sent: list[str | None] = []
    for operation in ("PutObject", "CompleteMultipartUpload"):
        refusing._client.meta.events.register(
            f"before-send.s3.{operation}", lambda request, **_: sent.append(_text(request.headers.get("If-Match")))
        )
    leftover = await refusing.put("k", source(b"leftover"), **TEXT)
    await refusing.put("k", source(b"right"), **TEXT, may_replace=lambda _there: True)
    assert sent[0] is None
    assert sent[-1] == leftover.etag


@pytest.mark.parametrize("only_new", [True, False])
async def test_a_signed_url_signs_the_condition_if_it_is_for_something_new(
    refusing: ObjectStore,
    only_new: bool,
) -> None:
    url = refusing.sign_put("u", content_type="text/plain", seconds=60, only_new=only_new)
    assert ("if-none-match" in parse_qs(urlsplit(url).query)["X-Amz-SignedHeaders"][0].split(";")) is only_new


def _text(header: bytes | str | None) -> str | None:
    return header.decode() if isinstance(header, bytes) else header


@pytest.mark.parametrize("size", [10, PART_BYTES + 1])
async def test_an_upload_by_pieces_that_may_only_create_is_refused_and_leaves_no_parts(
    refusing: ObjectStore, size: int
) -> None:
    await refusing.put("k", b"first", **TEXT)

    async def write(*, only_new: bool) -> None:
        async with refusing.upload("k", only_new=only_new) as upload:
            await upload.write(bytes(size))
            await upload.finish()

    with pytest.raises(PutRefused):
        await write(only_new=True)
    assert await refusing.read_head("k", 10) == b"first"
    assert await refusing.abort_uploads("") == 0
    await write(only_new=False)
    assert await refusing.read_head("k", 10) == bytes(10)


REFUSALS: list[tuple[str, int, type[StoreError]]] = [
    ("PreconditionFailed", 412, PutRefused),
    ("ConditionalRequestConflict", 409, PutRefused),  # S3: another conditional put of the key is under way
    ("", 412, PutRefused),
    ("", 409, PutRefused),
    ("NoSuchKey", 404, ObjectMissing),
    ("", 404, ObjectMissing),
    ("NoSuchBucket", 404, StoreUnavailable),  # the installation's fault: no job may fail for good because of it
    ("SlowDown", 503, StoreUnavailable),
    ("InternalError", 500, StoreUnavailable),
]


@pytest.mark.parametrize(("code", "status", "kind"), REFUSALS)
def test_a_store_may_refuse_by_code_or_by_status(code: str, status: int, kind: type[StoreError]) -> None:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(StoreError) as told, request("put", "k"):
        raise ClientError(answer, "PutObject")
    assert type(told.value) is kind


def test_an_answer_that_is_cut_counts_as_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[str] = []
    observed = SimpleNamespace(observe=lambda _seconds: None)

    def labels(_operation: str, outcome: str) -> SimpleNamespace:
        outcomes.append(outcome)
        return observed

    monkeypatch.setattr(s3, "REQUESTS", SimpleNamespace(labels=labels))
    for error in (StoreUnavailable("cut"), ValueError("the caller's own")):
        with pytest.raises(type(error)), request("get", "k"):
            raise error
    assert outcomes == ["unavailable", "left"]


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_the_store_refuses_are_no_outage(status: int) -> None:
    answer: Any = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(StoreError) as told, request("put", "k"):
        raise ClientError(answer, "PutObject")
    assert type(told.value) is StoreError


@pytest.mark.parametrize("conditional", [True, False])
async def test_an_upload_sends_the_condition_only_to_a_store_that_knows_it(
    refusing: ObjectStore, monkeypatch: pytest.MonkeyPatch, *, conditional: bool
) -> None:
    """Others answer an error to the header."""
    monkeypatch.setattr(refusing, "conditional", conditional)
    upload = refusing.upload("k", only_new=True)
    assert bool(upload._condition) is conditional


async def test_a_leftover_that_goes_while_its_bytes_are_compared_is_no_error(
    refusing: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store keeps no metadata, so the bytes are read. Else the step would fail for good, with `input_missing`."""
    await refusing.put("k", b"left", **TEXT)
    head, pieces = refusing.head, refusing._pieces

    async def bare_head(key: str) -> Stored | None:
        found = await head(key)
        return None if found is None else dataclasses.replace(found, sha256="", metadata={})

    async def gone(*arguments: Any, **options: Any) -> Any:
        await refusing.delete("k")
        async for piece in pieces(*arguments, **options):
            yield piece

    monkeypatch.setattr(refusing, "head", bare_head)
    monkeypatch.setattr(refusing, "_pieces", gone)
    await refusing.put("k", b"mine", **TEXT)
    monkeypatch.undo()
    assert await refusing.read_head("k", 10) == b"mine"


async def test_where_the_store_keeps_no_metadata_the_bytes_tell_whether_they_are_the_same(
    refusing: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts may store the same result, and its readers check the digest that the later attempt was answered. Of
    another result nothing is overwritten, though it has the same length.
    """
    await refusing.put("k", b"mine", **TEXT)
    head = refusing.head

    async def bare_head(key: str) -> Stored | None:
        found = await head(key)
        return None if found is None else dataclasses.replace(found, sha256="", metadata={})

    monkeypatch.setattr(refusing, "head", bare_head)
    again = await refusing.put("k", b"mine", **TEXT)
    assert (again.key, again.size, again.sha256) == ("k", 4, digest_of_bytes(b"mine"))
    assert await refusing.fetch_bytes("k", sha256=again.sha256, max_bytes=10) == b"mine"
    with pytest.raises(ObjectExists):
        await refusing.put("k", b"them", **TEXT)
    assert await refusing.read_head("k", 10) == b"mine"
