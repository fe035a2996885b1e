"""Runs an event loop in a separate thread. The app's connections belong to this loop, so callers with an event loop of
their own and callers without a loop can use the same connections.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from leasehold.domain.errors import LeaseholdError

T = TypeVar("T")  # what the work of a caller returns
#: After the portal's thread has cancelled the work, it waits for this many seconds. Then it cancels once more the work
#: that has not ended.
_CLOSE_SECONDS = 5.0


class PortalClosed(LeaseholdError):
    """The app's connections were closed while a call waited for them, or before the call began."""

    def __init__(self) -> None:
        super().__init__("the connections of the app were closed during this call")


class Portal:
    """Runs coroutines from any thread in one loop. A portal works only in the process that made it (`is_usable`)."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._loop.run_forever()
        # Cancel all asyncio tasks of this loop, until none is left. Callers in other threads wait for these tasks, and
        # without their end the callers would wait for ever.
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSE_SECONDS))
        self._loop.close()

    @property
    def is_usable(self) -> bool:
        """Whether the loop runs. False in a forked process, which has a copy of the loop, but not the loop's thread."""
        return self._pid == os.getpid() and self._thread.is_alive() and not self._is_closed

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop, and block the calling thread until it ends. Raises PortalClosed."""
        future = self._schedule(work)
        try:
            return future.result()
        except BaseException:
            # If this thread was interrupted, nobody waits for the work any more. If the work itself raised the error,
            # the work has ended, and `cancel` does nothing.
            future.cancel()
            raise

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop, and wait in the caller's own loop. Raises PortalClosed."""
        return await asyncio.wrap_future(self._schedule(work))

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` in the loop without waiting for it. Raises PortalClosed."""
        self._schedule(work)

    def _schedule(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:  # `close` must not stop the loop between the check and the call
            if self._is_closed:
                work.close()
                raise PortalClosed
            return asyncio.run_coroutine_threadsafe(self._run_until_closed(work), self._loop)

    async def _run_until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`. Raises PortalClosed if `close` cancels the work."""
        try:
            return await work
        except asyncio.CancelledError:
            if self._is_closed:
                raise PortalClosed from None
            raise

    def close(self) -> None:
        """Stop the loop. `_run` then cancels the work that has not ended. Blocks for at most 10 s."""
        if not self.is_usable:
            return
        with self._lock:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * _CLOSE_SECONDS)
