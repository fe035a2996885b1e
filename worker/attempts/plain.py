"""Runs a plain handler (not `async def`) in a thread, and gives it a BlockingAttempt. inline.py calls `in_thread`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Cancelled
from leasehold.domain.plain_attempt import PlainAttempt
from leasehold.worker.attempts.threads import Reservation

#: The names of attributes and methods. A plain handler may use only these of the attempt that it gets.
_PUBLIC = frozenset(name for name in dir(PlainAttempt) if not name.startswith("_"))


def is_plain(handler: Callable[..., Any]) -> bool:
    """Whether the function beneath the handler's decorators is a plain function, not an `async def`."""
    inner = inspect.unwrap(handler)
    # `inner` may also be an object whose class has an `async def __call__`.
    return not inspect.iscoroutinefunction(inner) and not inspect.iscoroutinefunction(type(inner).__call__)


class BlockingAttempt:
    """The object that a plain handler gets as its attempt (it has the interface of PlainAttempt). The coroutine methods
    of `attempt`, and `progress`, run in the event loop. The handler's thread waits for the coroutine methods only. All
    other methods run in the handler's thread.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._loop = asyncio.get_running_loop()
        self._has_ended = False

    def end(self) -> None:
        """Record that the attempt has ended. From now on, every use of this object in the thread raises Cancelled."""
        self._has_ended = True

    def progress(self, percent: float, summary: str = "") -> None:
        """Call Attempt.progress in the event loop, because it sets an asyncio.Event, and only the loop's thread may set
        one.
        """
        if self._has_ended:
            raise Cancelled
        self._loop.call_soon_threadsafe(self._attempt.progress, percent, summary)

    def __getattr__(self, name: str) -> Any:
        if name not in _PUBLIC:  # tools that print tracebacks read other names, and expect AttributeError
            raise AttributeError(name)
        if self._has_ended:
            raise Cancelled
        value = getattr(self._attempt, name)
        if inspect.iscoroutinefunction(value):
            return partial(self._wait, value)
        return value

    def _wait(self, method: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        """Run the method in the event loop. Blocks this thread until the method has returned."""
        result = asyncio.run_coroutine_threadsafe(method(*positional, **named), self._loop).result()
        if self._has_ended:
            raise Cancelled
        return result


async def in_thread(handler: Callable[..., Any], attempt: Attempt, thread: Reservation, names: tuple[str, str]) -> Any:
    """Call the handler in a reserved thread. If the caller is cancelled, the thread runs on, but in this thread the
    attempt's methods then raise Cancelled. `names`: the handler's pipeline and step.
    """
    blocking = BlockingAttempt(attempt)
    try:
        return await thread.run(partial(handler, blocking), names)
    finally:
        blocking.end()
