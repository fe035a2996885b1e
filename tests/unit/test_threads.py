"""Threads for plain handlers: what a handler raises, a cancellation and a full system leave every thread usable."""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

import pytest

from leasehold.worker.attempts.threads import Reservation, Threads

SECONDS = 5.0


async def reserved(threads: Threads) -> Reservation:
    reservation = await threads.reserve(SECONDS)
    assert reservation is not None
    return reservation


async def assert_works(threads: Threads) -> None:
    async with asyncio.timeout(SECONDS):
        assert await (await reserved(threads)).run(lambda: "done") == "done"


@pytest.mark.parametrize("raised", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_an_error_that_no_future_or_event_loop_may_get_becomes_a_runtime_error(
    raised: type[BaseException],
) -> None:
    def handler() -> NoReturn:
        raise raised

    threads = Threads(1)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RuntimeError, match=raised.__name__):
            await (await reserved(threads)).run(handler)
    await assert_works(threads)


async def test_work_that_is_cancelled_before_its_thread_begins_never_runs_and_costs_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_begin, ran = threading.Event(), []

    class Late(threading.Thread):
        def run(self) -> None:
            may_begin.wait(SECONDS)
            super().run()

    monkeypatch.setattr(threading, "Thread", Late)
    threads = Threads(1)
    running = asyncio.create_task((await reserved(threads)).run(lambda: ran.append("ran")))
    await asyncio.sleep(0)  # the work is in the queue of a thread that has not begun
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    may_begin.set()
    await assert_works(threads)
    assert not ran


async def test_a_system_without_room_for_a_thread_keeps_no_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    threads = Threads(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await (await reserved(threads)).run(lambda: "done")
    await assert_works(threads)
