"""Runs a plain handler (not `async def`) in a thread, with an attempt whose methods block that thread."""

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

_PUBLIC = frozenset(name for name in dir(PlainAttempt) if not name.startswith("_"))


def is_plain(handler: Callable[..., Any]) -> bool:
    """Whether the handler, without its decorators, is a plain function and no `async def`."""
    inner = inspect.unwrap(handler)
    return not inspect.iscoroutinefunction(inner) and not inspect.iscoroutinefunction(type(inner).__call__)


class BlockingAttempt:
    """The worker's PlainAttempt: the methods of `attempt` run in the event loop, and the handler's thread waits."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._loop = asyncio.get_running_loop()
        self._over = False

    def end(self) -> None:
        """The attempt has ended: from now on every use of this object in the thread raises Cancelled."""
        self._over = True

    def progress(self, percent: float, summary: str = "") -> None:
        """As Attempt.progress. It sets an event of the loop, which only the loop's thread may do."""
        if self._over:
            raise Cancelled
        self._loop.call_soon_threadsafe(self._attempt.progress, percent, summary)

    def __getattr__(self, name: str) -> Any:
        if name not in _PUBLIC:  # tools that print tracebacks read many attributes
            raise AttributeError(name)
        if self._over:
            raise Cancelled
        value = getattr(self._attempt, name)
        if inspect.iscoroutinefunction(value):
            return partial(self._wait, value)
        return value

    def _wait(self, method: Callable[..., Any], *positional: Any, **named: Any) -> Any:
        result = asyncio.run_coroutine_threadsafe(method(*positional, **named), self._loop).result()
        if self._over:
            raise Cancelled
        return result


async def in_thread(handler: Callable[..., Any], attempt: Attempt, thread: Reservation, names: tuple[str, str]) -> Any:
    """Call the handler in a reserved thread. If the caller is cancelled, the thread runs on by itself. `names`: the
    handler's pipeline and step.
    """
    blocking = BlockingAttempt(attempt)
    try:
        return await thread.run(partial(handler, blocking), names)
    finally:
        blocking.end()
