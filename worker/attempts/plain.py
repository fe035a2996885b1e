"""Running a plain handler: in a thread, with an attempt whose methods block it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from leasehold.domain.attempt import Attempt
from leasehold.domain.errors import Cancelled
from leasehold.domain.plain_attempt import PlainAttempt
from leasehold.worker.attempts.threads import Threads

_OFFERED = frozenset(name for name in dir(PlainAttempt) if not name.startswith("_"))


def is_plain(handler: Callable[..., Any]) -> bool:
    """Not an `async def`, however it is wrapped."""
    inner = inspect.unwrap(handler)
    return not inspect.iscoroutinefunction(inner) and not inspect.iscoroutinefunction(type(inner).__call__)


class BlockingAttempt:
    """The worker's PlainAttempt: what the attempt does in the loop is waited for in the thread."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._loop = asyncio.get_running_loop()
        self._over = False

    def end(self) -> None:
        """The attempt has ended, whether the thread has heard of it or not."""
        self._over = True

    def __getattr__(self, name: str) -> Any:
        if name not in _OFFERED:  # whoever prints a traceback asks for all sorts of things
            raise AttributeError(name)
        if self._over:
            raise Cancelled
        found = getattr(self._attempt, name)
        if inspect.iscoroutinefunction(found):
            return partial(self._wait, found)
        if name == "progress":  # wakes somebody in the loop
            return lambda *said: self._loop.call_soon_threadsafe(found, *said)
        return found

    def _wait(self, ask: Callable[..., Any], *values: Any, **named: Any) -> Any:
        answer = asyncio.run_coroutine_threadsafe(ask(*values, **named), self._loop).result()
        if self._over:
            raise Cancelled
        return answer


async def in_thread(handler: Callable[..., Any], attempt: Attempt, threads: Threads) -> Any:
    """What the handler returns or raises; a thread is kept for it. Cancelled, it leaves the thread to itself."""
    blocking = BlockingAttempt(attempt)
    try:
        return await threads.run(partial(_called, handler, blocking))
    finally:
        blocking.end()


def _called(handler: Callable[..., Any], attempt: BlockingAttempt) -> Any:
    try:
        return handler(attempt)
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # the loop would take them for the worker's own end
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error
