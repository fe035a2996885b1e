"""Runs plain functions in a bounded number of threads, for inline attempts and workflows. The process can end while a
thread runs.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, TypeAlias

import structlog

from leasehold.runtime.foreign_errors import contained
from leasehold.worker import metrics
from leasehold.worker.attempts.slot import Slot

log = structlog.get_logger(__name__)
#: A thread that runs on for this many seconds after its attempt has ended is stuck.
_STUCK_SECONDS = 10.0
#: A future, and the function to call in a thread. The future gets the function's result.
_Work: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class Reservation:
    """The right to one thread, from `Threads.reserve`. The caller calls `run` at most once, and `end` in any case."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._used = False

    async def run(self, work: Callable[[], Any], handler: tuple[str, str]) -> Any:
        """Run `work` in the thread, with the caller's context variables. Returns or raises what `work` does. `handler`:
        the pipeline and the step that `work` belongs to.

        A thread cannot be stopped. When the caller is cancelled, `work` goes on in its thread, and its result is
        dropped. The thread is free again only when `work` has ended.
        """
        self._used = True
        return await self._threads.run(work, handler)

    def end(self) -> None:
        """Free the thread, if nothing has run in it."""
        if not self._used:
            self._used = True
            self._threads.free()


class Threads:
    """At most `at_most` threads. A thread starts when it is first needed. Create this object in the event loop that
    calls `run`.

    `on_most_stuck`: called when over half of the threads are stuck. Nothing but the end of the process can stop a stuck
    thread.
    """

    def __init__(self, at_most: int, on_most_stuck: Callable[[], None]) -> None:
        self._at_most = at_most
        self._on_most_stuck = on_most_stuck
        self._stuck = 0
        self._free_threads = asyncio.Semaphore(at_most)  # threads that nobody has reserved, started or not
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._started = 0
        self._idle = 0  # started threads that wait for work
        self._loop = asyncio.get_running_loop()

    async def reserve(self, seconds: float, slot: Slot) -> Reservation | None:
        """Reserve a thread for the attempt in `slot`. While no thread is free, the slot is lent, so that another
        attempt may run in it. Returns None if no thread became free within `seconds`.
        """
        if not self._free_threads.locked():
            await self._free_threads.acquire()
            return Reservation(self)
        with slot.lent():
            try:
                async with asyncio.timeout(seconds):
                    await self._free_threads.acquire()
            except TimeoutError:
                return None
        return Reservation(self)

    def close(self) -> None:
        """End the threads. A thread that runs a handler ends after the handler. Without this method, a program that
        starts and stops workers, such as a suite of tests, would keep the threads of every worker.
        """
        for _ in range(self._started):
            self._work.put(None)

    def free(self) -> None:
        """Free a thread whose reservation ran nothing."""
        self._free_threads.release()

    async def run(self, work: Callable[[], Any], handler: tuple[str, str]) -> Any:
        """Run `work` in the thread of a reservation, as Reservation.run describes."""
        context = copy_context()
        if self._idle == 0 and self._started < self._at_most:
            self._start_thread()
        else:
            self._idle -= 1  # the reservation proves that a started thread is idle, or will be in a moment
        future: Future[Any] = Future()
        future.add_done_callback(self._on_done)
        self._work.put((future, lambda: context.run(work)))
        try:
            return await asyncio.wrap_future(future)
        finally:
            if not future.done():
                self._loop.call_later(_STUCK_SECONDS, self._count_if_stuck, future, handler)

    def _count_if_stuck(self, future: Future[Any], handler: tuple[str, str]) -> None:
        """Report the thread of an attempt that ended `_STUCK_SECONDS` ago, if the thread still runs."""
        if future.done():
            return
        self._stuck += 1
        metrics.STUCK_THREADS.labels(*handler).inc()
        pipeline, step = handler
        log.warning(
            "a handler runs on in its thread after its attempt has ended: call checkpoint() in the handler, or use "
            "process=True",
            pipeline=pipeline,
            step=step,
            stuck=self._stuck,
            threads=self._at_most,
        )
        future.add_done_callback(partial(self._on_unstuck, handler))
        if 2 * self._stuck > self._at_most:
            log.error("over half of the threads are stuck: this worker drains, so that another takes its place")
            self._on_most_stuck()

    def _on_unstuck(self, handler: tuple[str, str], _future: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._count_unstuck, handler)

    def _count_unstuck(self, handler: tuple[str, str]) -> None:
        self._stuck -= 1
        metrics.STUCK_THREADS.labels(*handler).dec()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._serve, name=f"handler-{self._started + 1}", daemon=True).start()
        except RuntimeError:  # the system has no room for another thread now
            self._free_threads.release()
            raise
        self._started += 1

    def _on_done(self, _future: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._mark_free)

    def _mark_free(self) -> None:
        self._idle += 1
        self._free_threads.release()

    def _serve(self) -> None:
        """The main function of each thread: do the work of the queue until `close`."""
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue  # the caller was cancelled before this thread began
            try:
                result = work()
            except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
                future.set_exception(contained(error))  # as a RuntimeError, because these errors harm an event loop
            except BaseException as error:  # noqa: BLE001 - the caller of `run` gets an error of any kind
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work
