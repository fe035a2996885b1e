"""Runs the work of an attempt so that the worker can stop it. If a handler ignores the stop, the attempt ends without
waiting for the handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

_Result = TypeVar("_Result")

#: Seconds that a cancelled caller of `StoppableWork.result` has to settle the result.
_SETTLE_SECONDS = 2.0


class StoppableWork(Generic[_Result]):
    """Runs `work` as an asyncio task. After `stop` the work has `seconds` to end. After that time the attempt gives the
    work up: the attempt waits no longer, although `task` may run on.
    """

    __slots__ = ("_end", "_seconds", "_timer", "task")

    def __init__(self, work: Coroutine[Any, Any, _Result], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.task: asyncio.Task[_Result] = loop.create_task(work)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Future[None] = loop.create_future()  # done when the task has ended, or is given up
        self.task.add_done_callback(self._set_end)

    def stop(self) -> None:
        """Cancel the work, which may still clean up. If the work catches the CancelledError and goes on, the attempt
        gives the work up after `seconds`.
        """
        self.task.cancel()
        if self._timer is None and not self.task.done():
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._set_end)

    async def result(self) -> _Result:
        """Wait for the work, and return its result or raise its error. If the work is given up, raises CancelledError,
        and `task` is not done.

        If the caller is cancelled, this method stops the work, and waits for its end. It still returns the work's
        result or raises its error, so that the caller can settle the attempt. But a settlement waits without limit
        while PostgreSQL does not answer. So the caller is cancelled again after `_SETTLE_SECONDS`.
        """
        try:
            await self._end
        except asyncio.CancelledError:
            if not self.task.done():
                self._end = asyncio.get_running_loop().create_future()  # the cancel has also cancelled the old future
                self.stop()
                await self._end
            caller = asyncio.current_task()
            assert caller is not None
            asyncio.get_running_loop().call_later(_SETTLE_SECONDS, caller.cancel)
        if not self.task.done():
            raise asyncio.CancelledError
        return await self.task

    def _set_end(self, _task: object = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._end.done():
            self._end.set_result(None)
