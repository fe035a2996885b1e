"""Handles errors of code that is not the platform's own: handlers, and functions that workflows call. Such code may
raise anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def text_of(error: BaseException) -> str:
    """`TYPE: MESSAGE`. If the error's own `__str__` raises, the text has only the type."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - `__str__` may raise anything
        return f"{type(error).__name__}: its message cannot be read"


def contained(error: BaseException) -> RuntimeError:
    """The RuntimeError to raise in place of `error`. Use it for errors that do harm outside of the call that raised
    them.

    If a task raises SystemExit or KeyboardInterrupt, asyncio ends the event loop. A future cannot hold StopIteration. A
    GeneratorExit looks as if the coroutine that awaits the call was closed.
    """
    replacement = RuntimeError(f"the function raised {text_of(error)}")
    replacement.__cause__ = error
    return replacement


async def call_in_thread(
    function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Call a function that is not the platform's own in a thread. `contained` replaces errors that must not leave the
    thread. With asyncio.to_thread alone, the caller would wait for ever if the function raised StopIteration.
    """

    def call() -> _Result:
        try:
            return function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
            raise contained(error) from error

    return await asyncio.to_thread(call)
