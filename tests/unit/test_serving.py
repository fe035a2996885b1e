"""The block of `app.serving()` learns that its worker has failed, and a retired worker drains beside it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from leasehold.app.serving import watched

SECONDS = 60.0


class FakeWorker:
    """Counts its drains. `failure`: as that of a worker."""

    def __init__(self) -> None:
        self.drains = 0
        self.drained = asyncio.Event()
        self.retired = asyncio.Event()
        self.failure: asyncio.Future[None] = asyncio.Future()

    async def failed(self) -> None:
        await asyncio.shield(self.failure)

    async def drain(self) -> None:
        self.drains += 1
        self.drained.set()


def of(worker: FakeWorker) -> Any:
    fake: Any = worker
    return watched(fake)


async def test_the_error_of_a_worker_ends_the_block_and_is_raised_from_it() -> None:
    worker = FakeWorker()

    async def program() -> None:
        async with of(worker):
            worker.failure.set_exception(ValueError("no heartbeat"))
            await asyncio.Event().wait()

    task = asyncio.create_task(program())
    with pytest.raises(ValueError, match="no heartbeat"):
        await asyncio.wait_for(task, SECONDS)
    assert worker.drains == 0
    assert task.cancelling() == 0  # the program may go on, and await


async def test_a_block_that_catches_the_cancel_raises_the_error_at_its_end() -> None:
    worker = FakeWorker()
    task = asyncio.current_task()
    assert task is not None

    async def program() -> None:
        async with of(worker):
            worker.failure.set_exception(ValueError("no heartbeat"))
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(SECONDS)

    with pytest.raises(ValueError, match="no heartbeat"):
        await program()
    assert task.cancelling() == 0


async def test_a_block_that_raises_another_error_instead_raises_that() -> None:
    worker = FakeWorker()
    task = asyncio.current_task()
    assert task is not None

    async def program() -> None:
        async with of(worker):
            worker.failure.set_exception(ValueError("no heartbeat"))
            try:
                await asyncio.sleep(SECONDS)
            except asyncio.CancelledError as error:
                raise KeyError from error

    with pytest.raises(KeyError):
        await program()
    assert task.cancelling() == 0


async def test_who_cancels_the_block_at_the_same_time_sees_it_cancelled() -> None:
    worker = FakeWorker()

    async def program() -> None:
        async with of(worker):
            await asyncio.sleep(SECONDS)

    task = asyncio.create_task(program())
    await asyncio.sleep(0.01)
    worker.failure.set_exception(ValueError("no heartbeat"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_retired_worker_drains_while_the_block_goes_on() -> None:
    worker = FakeWorker()
    async with of(worker):
        await asyncio.sleep(0)
        assert worker.drains == 0
        worker.retired.set()
        await asyncio.wait_for(worker.drained.wait(), SECONDS)
        await asyncio.sleep(0.01)


async def test_the_worker_drains_at_the_end_of_the_block() -> None:
    worker = FakeWorker()
    async with of(worker):
        pass
    assert worker.drains == 1

    async def fails() -> None:
        async with of(worker):
            raise KeyError

    with pytest.raises(KeyError):
        await fails()
    assert worker.drains == 2
