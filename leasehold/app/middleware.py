"""Middleware of an app: async generators that run around each attempt, for example to report errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

from leasehold.app.current import Current, enter, leave

#: A function of the app's program. The attempt runs at its only `yield`.
Middleware: TypeAlias = Callable[[Current], AsyncIterator[None]]


def around(task: str, middleware: Sequence[Middleware]) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """Return a function that makes a context manager for an attempt of the task. The worker runs the attempt inside the
    context manager, where `current()` returns the attempt. `middleware`: the functions, the outermost first.
    """

    @asynccontextmanager
    async def around_attempt(attempt: Any) -> AsyncIterator[None]:
        current = Current(task, attempt)
        token = enter(current)
        try:
            async with AsyncExitStack() as stack:
                # Each function runs up to its `yield` here, and goes on when the stack closes, the innermost first.
                for function in middleware:
                    await stack.enter_async_context(asynccontextmanager(function)(current))
                yield
        finally:
            leave(token)

    return around_attempt
