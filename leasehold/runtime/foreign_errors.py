"""Handles errors of code that is not the platform's own: handlers, and functions that workflows call. Such code may
raise anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

#: Whether the current context runs code that is not the platform's own. An asyncio task inherits this mark from the
#: task that made it.
_is_foreign: ContextVar[bool] = ContextVar("is_foreign", default=False)


def text_of(error: BaseException) -> str:
    """`TYPE: MESSAGE`. If the error's own `__str__` raises, the text has only the type."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - `__str__` may raise anything
        return f"{type(error).__name__}: its message cannot be read"


def contained(error: BaseException) -> RuntimeError:
    """The RuntimeError to raise in place of `error`. Use it for the errors that do harm outside of the call that raised
    them. These are the errors, and the harm:

    SystemExit and KeyboardInterrupt: if an asyncio task raises one of them, asyncio ends the event loop. StopIteration:
    a future cannot hold it. GeneratorExit: it looks as if the coroutine that awaits the call was closed.
    """
    replacement = RuntimeError(f"the function raised {text_of(error)}")
    replacement.__cause__ = error
    return replacement


async def call_in_thread(
    function: Callable[_Parameters, _Result], *args: _Parameters.args, **kwargs: _Parameters.kwargs
) -> _Result:
    """Call, in a thread, a function that is not the platform's own. `contained` replaces errors that must not leave the
    thread. With asyncio.to_thread alone, the caller would wait for ever if the function raised StopIteration.
    """

    def call() -> _Result:
        try:
            return function(*args, **kwargs)
        except (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration) as error:
            raise contained(error) from error

    return await asyncio.to_thread(call)


def begin_foreign_code() -> None:
    """From now on, the current asyncio task runs code that is not the platform's own. If a block of `exits_contained`
    is open, the asyncio tasks that this code makes cannot end the event loop.
    """
    _is_foreign.set(True)


@contextmanager
def exits_contained() -> Iterator[None]:
    """During the block, foreign code (see `begin_foreign_code`) may make asyncio tasks. If such a task raises
    SystemExit or KeyboardInterrupt, the task ends with a RuntimeError instead (`contained`). With asyncio alone, such
    an exit would end the running event loop, even if other code awaits the task and catches its errors. Exception: a
    callback (`call_soon`) that raises SystemExit or KeyboardInterrupt still ends the loop.

    The block sets the loop's task factory. The new factory calls the factory that the program had set before. Several
    blocks of one loop use the same factory, and the last block to end restores the program's own factory.
    """
    loop = asyncio.get_running_loop()
    current: Any = loop.get_task_factory()
    factory = current if isinstance(current, _TaskFactory) else _TaskFactory(current)
    loop.set_task_factory(factory)
    factory.users += 1
    try:
        yield
    finally:
        factory.users -= 1
        # Do not remove a factory that the program has set meanwhile.
        if not factory.users and loop.get_task_factory() is factory:
            loop.set_task_factory(factory.of_program)


class _TaskFactory:
    """A task factory of asyncio. `of_program`: the factory that makes the tasks; None: asyncio's own class Task makes
    them. `users`: how many blocks of `exits_contained` need this factory now.
    """

    def __init__(self, of_program: Callable[..., Any] | None) -> None:
        self.of_program = of_program
        self.users = 0
        self._make: Callable[..., Any] = of_program or _make_task

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        if _is_foreign.get() and asyncio.iscoroutine(coroutine):  # for any other object asyncio raises TypeError
            coroutine = _ExitsContained(coroutine)
        return self._make(loop, coroutine, **options)


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


class _ExitsContained(Coroutine[Any, Any, Any]):
    """A coroutine in which `contained` replaces SystemExit and KeyboardInterrupt. All other attributes are those of
    `coroutine`, for example its name, and the frame by which libraries see whether the coroutine has begun.
    """

    __slots__ = ("_coroutine",)

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise contained(error) from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as exit_error:
            raise contained(exit_error) from exit_error

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)
