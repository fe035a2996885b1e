"""Who reads an object by its signed URL keeps no more of it than was stored."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import httpx2
import pytest

from leasehold.app.http_link import HttpLink
from leasehold.app.results import OUTPUT
from leasehold.app.terms import STEP
from leasehold.client import models
from leasehold.client.async_client import AsyncClient
from leasehold.client.external import Task
from leasehold.domain.errors import Retryable, Unavailable
from tests.client.stores import endless_store, store_of

SECONDS = 60.0
BYTES = b"a result"
SIGNED = "?X-Amz-Signature=0123456789abcdef"
SHA256 = hashlib.sha256(BYTES).hexdigest()


def _task(store: httpx2.AsyncClient, url: str) -> Task:
    async def answer(*_arguments: Any, **_fields: Any) -> dict[str, Any]:
        return {"files": [{"url": url, "headers": {}}]}

    file = {"step": "made", "name": "a", "size": len(BYTES), "sha256": SHA256, "content_type": "x/y", "url": url}
    return Task({"task_id": "1", "step": "used", "files": [file], "epoch": 1}, answer, store)


class _Api(AsyncClient):
    """Answers every request with a job that has one output, behind the URL."""

    def __init__(self, url: str) -> None:
        super().__init__("http://127.0.0.1:9", "lh_x_y")
        self._of_output = url

    async def send(self, _call: Any) -> Any:
        output = {"step": STEP, "name": OUTPUT, "key": "k", "size": len(BYTES), "sha256": SHA256,
                  "content_type": "application/json", "url": self._of_output}  # fmt: skip
        known: dict[str, Any] = {"outputs": [models.Output.model_validate(output)]}
        return models.Job.model_construct(**known)


async def _by_worker(store: httpx2.AsyncClient, url: str) -> bytes:
    return await _task(store, url).read("a")


async def _by_app(store: httpx2.AsyncClient, url: str) -> bytes:
    async with _Api(url) as api:
        return await HttpLink(api, store)._read_stored_result(uuid4())


Read = Callable[[httpx2.AsyncClient, str], Awaitable[bytes]]
readers = pytest.mark.parametrize(
    ("read", "refusal"), [(_by_worker, Retryable), (_by_app, Unavailable)], ids=["external worker", "app"]
)


@readers
async def test_an_answer_that_does_not_end_is_given_up(read: Read, refusal: type[Exception]) -> None:
    async with endless_store() as url, httpx2.AsyncClient(timeout=40) as store, asyncio.timeout(SECONDS):
        with pytest.raises(refusal, match="are not those that were stored"):
            await read(store, url)


@readers
async def test_bytes_that_unpack_to_more_are_not_unpacked(read: Read, refusal: type[Exception]) -> None:
    head, body = "Content-Encoding: gzip\r\n", gzip.compress(bytes(50_000_000))
    async with store_of(head, body) as url, httpx2.AsyncClient(timeout=40) as store, asyncio.timeout(SECONDS):
        with pytest.raises(refusal, match="are not those that were stored"):
            await read(store, url)


@pytest.mark.parametrize("status", [307, 403])
@readers
async def test_a_refusal_of_the_store_does_not_show_the_signed_url(
    read: Read, refusal: type[Exception], status: int
) -> None:
    async with store_of("", b"<Error/>", status=f"{status} No") as url, httpx2.AsyncClient(timeout=40) as store:
        with pytest.raises(refusal, match=f"the store answered {status}") as raised:
            await read(store, url + SIGNED)
    assert SIGNED not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize("status", [307, 403, 500])
async def test_a_file_that_the_store_does_not_take_fails_the_attempt_without_its_signed_url(status: int) -> None:
    async with store_of("", b"<Error/>", status=f"{status} No") as url, httpx2.AsyncClient(timeout=40) as store:
        task = _task(store, url + SIGNED)
        with pytest.raises(Retryable, match=f"the store answered {status} for a") as raised:
            await task.write("a", BYTES)
    assert raised.value.code == "file_unwritable"
    assert SIGNED not in "".join(traceback.format_exception(raised.value))
    assert task.sent == {}


async def test_a_store_that_is_away_fails_the_attempt_with_the_codes_of_its_refusals() -> None:
    async with httpx2.AsyncClient(timeout=40) as store:
        task = _task(store, f"http://127.0.0.1:1/{SIGNED}")
        with pytest.raises(Retryable, match=r"the store did not answer \(ConnectError\) for a") as unread:
            await task.read("a")
        with pytest.raises(Retryable, match=r"the store did not answer \(ConnectError\) for a") as unwritten:
            await task.write("a", BYTES)
    assert (unread.value.code, unwritten.value.code) == ("file_unreadable", "file_unwritable")
    for error in (unread.value, unwritten.value):
        assert SIGNED not in "".join(traceback.format_exception(error))


@readers
async def test_what_was_stored_is_read(read: Read, refusal: type[Exception]) -> None:
    async with store_of("", BYTES) as url, httpx2.AsyncClient(timeout=40) as store:
        assert await read(store, url) == BYTES
    async with store_of("", BYTES[:-1]) as url, httpx2.AsyncClient(timeout=40) as store:
        with pytest.raises(refusal, match="are not those that were stored"):
            await read(store, url)
