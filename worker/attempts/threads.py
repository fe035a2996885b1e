"""Threads for handlers that are plain functions: so many and no more, and none that keeps the process from ending."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeAlias

_Work: TypeAlias = "tuple[Future[Any], Callable[[], Any]]"


class Threads:
    """At most `most` threads, started when they are needed first. Made in the loop that `run` is called in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = asyncio.Semaphore(most)
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._started = 0
        self._idle = 0
        self._loop = asyncio.get_running_loop()

    async def keep(self, seconds: float) -> bool:
        """Keep a thread for the `run` that follows at once. False: none has become free within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            return False
        return True

    async def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises, in a thread that `keep` has kept; it sees this task's context variables.

        A thread cannot be stopped. When this task is cancelled, `work` goes on in its thread, which is free again only
        when it has ended, and what it returns is thrown away.
        """
        future: Future[Any] = Future()
        future.add_done_callback(self._done)
        context = copy_context()
        if self._idle == 0 and self._started < self._most:
            self._started += 1
            threading.Thread(target=self._serve, name=f"handler-{self._started}", daemon=True).start()
        else:
            self._idle -= 1
        self._work.put((future, lambda: context.run(work)))
        return await asyncio.wrap_future(future)

    def _done(self, _future: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._vacate)

    def _vacate(self) -> None:
        self._idle += 1
        self._free.release()

    def _serve(self) -> None:
        while True:
            future, work = self._work.get()
            future.set_running_or_notify_cancel()
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to who waits for it
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, work
