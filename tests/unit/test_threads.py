"""Threads for plain handlers: what a handler raises, a cancellation and a full system leave every thread usable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest

from leasehold.worker.attempts.threads import Reservation, Threads

SECONDS = 60.0
HANDLER = ("pipeline", "step")


class Lending:
    """A leasehold.worker.attempts.slot.Slot that counts how often it is lent."""

    def __init__(self) -> None:
        self.times = 0
        self.is_lent = False

    def may_continue(self) -> bool:
        return False

    def rest_while(self, is_down: Callable[[], bool]) -> None:
        raise NotImplementedError

    @contextmanager
    def lent(self) -> Iterator[None]:
        self.times += 1
        self.is_lent = True
        yield
        self.is_lent = False


def of(at_most: int) -> Threads:
    return Threads(at_most, lambda: None)


async def reserved(threads: Threads) -> Reservation:
    reservation = await threads.reserve(SECONDS, Lending())
    assert reservation is not None
    return reservation


async def assert_works(threads: Threads) -> None:
    async with asyncio.timeout(SECONDS):
        assert await (await reserved(threads)).run(lambda: "done", HANDLER) == "done"


@pytest.mark.parametrize("raised", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
async def test_an_error_that_no_future_or_event_loop_may_get_becomes_a_runtime_error(
    raised: type[BaseException],
) -> None:
    def handler() -> NoReturn:
        raise raised

    threads = of(1)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RuntimeError, match=raised.__name__):
            await (await reserved(threads)).run(handler, HANDLER)
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
    threads = of(1)
    running = asyncio.create_task((await reserved(threads)).run(lambda: ran.append("ran"), HANDLER))
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

    threads = of(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            await (await reserved(threads)).run(lambda: "done", HANDLER)
    await assert_works(threads)


async def test_a_slot_is_lent_only_while_no_thread_is_free() -> None:
    threads, slot = of(1), Lending()
    first = await threads.reserve(SECONDS, slot)
    assert first is not None
    assert slot.times == 0
    second = asyncio.create_task(threads.reserve(SECONDS, slot))
    await asyncio.sleep(0)
    assert slot.is_lent
    first.end()
    assert await second is not None
    assert (slot.times, slot.is_lent) == (1, False)
    assert await threads.reserve(0, slot) is None
    assert (slot.times, slot.is_lent) == (2, False)


async def test_threads_end_when_they_are_closed_and_one_that_works_after_its_work() -> None:
    """Each worker of a program that starts several left its threads behind."""
    threads, go_on = of(2), threading.Event()

    def works() -> threading.Thread:
        go_on.wait(SECONDS)
        return threading.current_thread()

    working = asyncio.create_task((await reserved(threads)).run(works, HANDLER))
    await asyncio.sleep(0)
    idle = await (await reserved(threads)).run(threading.current_thread, HANDLER)
    threads.close()
    await asyncio.to_thread(idle.join, SECONDS)
    assert not idle.is_alive()
    assert not working.done()
    go_on.set()
    busy = await working
    await asyncio.to_thread(busy.join, SECONDS)
    assert not busy.is_alive()
