"""A task that a handler makes, and that exits, fails the handler: it does not end the event loop of the worker."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any

import pytest
import uvloop

from leasehold.runtime.foreign_errors import begin_foreign_code, exits_contained

Exit = type[SystemExit] | type[KeyboardInterrupt]


@pytest.fixture(params=[None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Event loops of the tests' own: an exit that is not contained ends only these."""
    with asyncio.Runner(loop_factory=request.param) as running:
        yield running


async def gathered(command: Coroutine[Any, Any, Any]) -> None:
    await asyncio.gather(command)


async def made(command: Coroutine[Any, Any, Any]) -> None:
    await asyncio.create_task(command, context=Context())


class OfLibrary(Coroutine[Any, Any, Any]):
    """A coroutine that no `async def` made, as Cython's."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


async def of_library(command: Coroutine[Any, Any, Any]) -> None:
    await asyncio.create_task(OfLibrary(command))


async def grouped(command: Coroutine[Any, Any, Any]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.wait_for(command, 60))


async def cleaning_up(command: Coroutine[Any, Any, Any]) -> None:
    """The task exits while it is cancelled."""

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await command

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    task.cancel()
    await task


@pytest.mark.parametrize("exits", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("awaits", [gathered, made, of_library, grouped, cleaning_up])
def test_a_task_of_a_handler_that_exits_is_an_error_of_the_handler(
    runner: asyncio.Runner, awaits: Callable[[Coroutine[Any, Any, Any]], Awaitable[None]], exits: Exit
) -> None:
    async def command() -> None:
        raise exits(0)

    async def handler() -> None:
        begin_foreign_code()
        await awaits(command())

    async def worker() -> BaseException | None:
        with exits_contained():
            task = asyncio.create_task(handler())
            await asyncio.wait({task})
            return task.exception()

    error = runner.run(worker())
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert type(error) is RuntimeError
    assert str(error) == f"the function raised {exits.__name__}: 0"
    assert isinstance(error.__cause__, exits)


def test_a_task_of_a_handler_keeps_its_name_its_result_and_what_libraries_ask_of_its_coroutine(
    runner: asyncio.Runner, recwarn: pytest.WarningsRecorder
) -> None:
    async def command() -> int:
        await asyncio.sleep(0)
        return 7

    async def worker() -> None:
        begin_foreign_code()
        with exits_contained():
            task = asyncio.create_task(command(), name="mine")
            coroutine: Any = task.get_coro()
            assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED  # as anyio asks
            assert (task.get_name(), coroutine.__name__) == ("mine", "command")
            await asyncio.sleep(0)
            assert inspect.getcoroutinestate(coroutine) == inspect.CORO_SUSPENDED
            assert await task == 7
            never_begun = asyncio.create_task(command())
            never_begun.cancel()
            await asyncio.wait({never_begun})
            assert never_begun.cancelled()

    runner.run(worker())
    assert not [str(warning.message) for warning in recwarn]  # such as: the coroutine was never awaited


@pytest.mark.parametrize("make", [lambda: print, lambda: asyncio.get_running_loop().create_future()])
def test_a_task_of_what_is_no_coroutine_is_an_error_in_the_line_that_makes_it(
    runner: asyncio.Runner, make: Callable[[], Any]
) -> None:
    """As `create_task(fetch)` without the parentheses of a call. The task failed later, with an AttributeError."""

    async def worker() -> None:
        begin_foreign_code()
        with exits_contained(), pytest.raises(TypeError, match="a coroutine was expected, got"):
            await asyncio.create_task(make())

    runner.run(worker())


def test_the_tasks_of_the_platform_and_of_the_program_are_as_they_were(runner: asyncio.Runner) -> None:
    made_by_program: list[Any] = []

    def factory_of_program(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        made_by_program.append(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def nothing() -> None: ...

    async def handler() -> None:
        begin_foreign_code()
        await asyncio.create_task(nothing())

    async def worker() -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(factory_of_program)
        with exits_contained():
            with exits_contained():  # a second worker in the same loop, which ends first
                pass
            own = nothing()
            await asyncio.create_task(own)
            assert made_by_program == [own]
            await asyncio.create_task(handler())
            _, handled, inner = made_by_program
            assert inspect.iscoroutine(handled)
            assert not inspect.iscoroutine(inner)  # the factory of the program makes it, and its exits are contained
        assert loop.get_task_factory() is factory_of_program
        with exits_contained():
            loop.set_task_factory(None)
        assert loop.get_task_factory() is None

    runner.run(worker())
