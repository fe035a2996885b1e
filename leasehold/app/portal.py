"""An event loop in a thread of its own: callers with and without a loop use the same connections."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


class Portal:
    """Runs coroutines of any thread in one loop. It belongs to the process that made it: see `is_usable`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """False in a child process that was forked: it has the memory of the loop, and no thread."""
        return self._pid == os.getpid() and self._thread.is_alive()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop, and block the calling thread meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted: nobody waits for the work
            raise

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the loop, and wait in the caller's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        if not self.is_usable:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
