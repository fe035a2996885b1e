"""Handlers whose time in the event loop is measured: what they await reaches them as if nobody measured."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from leasehold.worker.attempts.stalls import Watched


class Plain:
    """An awaitable whose iterator is no generator: it has neither `send` nor `throw`."""

    def __init__(self, futures: list[asyncio.Future[None]]) -> None:
        self._futures = futures

    def __await__(self) -> Any:
        return _Steps(self._futures)


class _Steps(Iterator[asyncio.Future[None]]):
    def __init__(self, futures: list[asyncio.Future[None]]) -> None:
        self._left = list(futures)

    def __next__(self) -> asyncio.Future[None]:
        if not self._left:
            raise StopIteration
        future = self._left.pop(0)
        future._asyncio_future_blocking = True  # what `Future.__await__` sets before it yields the future
        return future


async def test_an_awaitable_that_is_no_generator_runs_to_its_end() -> None:
    futures = [asyncio.get_running_loop().create_future() for _ in range(2)]
    for future in futures:
        asyncio.get_running_loop().call_soon(future.set_result, None)
    await Watched(Plain(futures), "demo", "work", 60)
    assert all(future.done() for future in futures)


async def test_a_cancel_ends_an_awaitable_that_cannot_take_it() -> None:
    futures = [asyncio.get_running_loop().create_future() for _ in range(2)]

    async def handle() -> None:
        await Watched(Plain(futures), "demo", "work", 60)

    handling = asyncio.create_task(handle())
    await asyncio.sleep(0)
    handling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(handling, 60)
