"""Runs several coroutines at once, cancels asyncio tasks, and says whether such a task has failed or is being
cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run the coroutines at once, and return their results in order. After the first error, cancel the other
    coroutines, wait until they have ended, and raise the error.

    This is not a TaskGroup, because a TaskGroup raises an ExceptionGroup, and callers match the error by its type.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the asyncio tasks, and wait until they have ended. Their errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def has_failed(task: asyncio.Future[Any]) -> bool:
    """Whether the asyncio task has ended without a result, because it raised an error or was cancelled."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def being_cancelled() -> bool:
    """Whether somebody has cancelled the current asyncio task. If not, a CancelledError comes from something that this
    task has awaited. The answer is also True if no asyncio task runs now.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def check_not_cancelled() -> None:
    """Raises CancelledError if somebody has cancelled the current asyncio task.

    A loop that goes on after errors calls this function after each error, because a library may have turned the cancel
    into that error. Without this check such a loop would never end.
    """
    if being_cancelled():
        raise asyncio.CancelledError
