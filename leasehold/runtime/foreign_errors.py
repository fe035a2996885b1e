"""Errors of code that is not the platform's (handlers, functions of workflows), which may be of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def text_of(error: BaseException) -> str:
    """`TYPE: MESSAGE`. If the error's own `__str__` raises, the text has only the type."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - whatever the error's class raises: the text must name the first error
        return f"{type(error).__name__}: its message cannot be read"


def contained(error: BaseException) -> RuntimeError:
    """The RuntimeError to raise in place of `error`, which would do harm outside of the call that raised it.

    If a task raises SystemExit or KeyboardInterrupt, asyncio ends the event loop. A future cannot hold StopIteration. A
    GeneratorExit looks as if the coroutine that awaits the call was closed.
    """
    replacement = RuntimeError(f"the function raised {text_of(error)}")
    replacement.__cause__ = error
    return replacement


async def call_in_thread(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function of other code in a thread. Errors that may not leave the thread are raised `contained`; with
    asyncio.to_thread the caller of a function that raises StopIteration waits for ever.
    """

    def call() -> _T:
        try:
            return function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
            raise contained(error) from error

    return await asyncio.to_thread(call)
