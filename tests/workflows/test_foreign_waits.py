"""What a workflow's code may not use of asyncio: whatever needs a task of its own. Each such use fails the run with
`workflow_awaits`, and says what to use instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from uuid import uuid4

import anyio
import pytest

from leasehold import Cancelled, Context, Permanent
from leasehold.runtime.foreign_errors import exits_contained
from leasehold.workflows.driver import Driver
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start
from tests.workflows.test_calls import Port, driven, entry, note

Code = Callable[[Context], Coroutine[Any, Any, Any]]

#: What has run although it must not.
ran: list[str] = []


async def effect() -> None:
    ran.append("effect")


async def times_out(ctx: Context) -> None:
    async with asyncio.timeout(0.01):
        await ctx.wait_for("approved")


async def times_out_by_anyio(ctx: Context) -> None:
    with anyio.fail_after(0.01):
        await ctx.wait_for("approved")


async def moves_on_by_anyio(ctx: Context) -> None:
    with anyio.move_on_after(0.01):
        await ctx.wait_for("approved")


async def waits_for(ctx: Context) -> None:
    await asyncio.wait_for(ctx.wait_for("approved"), 0.01)


async def shields(ctx: Context) -> None:
    await asyncio.shield(ctx.wait_for("approved"))


async def begins_a_task(ctx: Context) -> None:
    task = asyncio.create_task(effect())
    await ctx.sleep(5)
    await task


async def forgets_a_task(ctx: Context) -> None:
    background = asyncio.ensure_future(effect())
    await ctx.sleep(5)
    del background


async def begins_a_task_by_the_loop(ctx: Context) -> None:
    background = asyncio.get_running_loop().create_task(effect(), name="effect")
    await ctx.sleep(5)
    del background


async def begins_a_group(ctx: Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(effect())
        await ctx.sleep(5)


async def begins_a_group_by_anyio(ctx: Context) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(effect)
        await ctx.sleep(5)


async def gathers(ctx: Context) -> None:
    await asyncio.gather(ctx.sleep(5), ctx.sleep(6))


async def begins_a_task_of_a_call(ctx: Context) -> None:
    wait: Any = ctx.sleep(5)
    await asyncio.create_task(wait)


async def cancels_itself(ctx: Context) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await ctx.sleep(5)


async def hears_of_its_end(ctx: Context) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(lambda _: ran.append("callback"))
    await ctx.sleep(5)


async def takes_a_cancel_back(ctx: Context) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
    await ctx.sleep(5)


async def catches_it(ctx: Context) -> None:
    with suppress(Exception):
        async with asyncio.timeout(0.01):
            await ctx.wait_for("approved")
    await ctx.sleep(5)


async def catches_it_and_ends(ctx: Context) -> None:
    with suppress(Exception):
        asyncio.create_task(effect())  # noqa: RUF006 - it is refused


async def in_a_branch(ctx: Context) -> None:
    await ctx.gather(ctx.sleep(5), times_out(ctx))


async def sleeps(ctx: Context) -> None:
    await asyncio.sleep(0.01)


async def yields(ctx: Context) -> None:
    await asyncio.sleep(0)


async def sleeps_by_anyio(ctx: Context) -> None:
    await anyio.sleep(0.01)


async def uses_a_thread(ctx: Context) -> None:
    await asyncio.to_thread(int)


LIMITS = [times_out, times_out_by_anyio, moves_on_by_anyio, catches_it, in_a_branch]
TASKS = [
    begins_a_task, forgets_a_task, begins_a_task_by_the_loop, begins_a_task_of_a_call, begins_a_group, gathers, shields,
    catches_it_and_ends,
]  # fmt: skip
AWAITS = [sleeps, yields, sleeps_by_anyio, uses_a_thread]


def driver_of(code: Code) -> tuple[Driver, Any]:
    return Driver(uuid4(), lambda it: code(Context(it)), 100), Port()


async def refusal_of(code: Code) -> str:
    """The message of the error with which the workflow fails at once."""
    ran.clear()
    driver, port = driver_of(code)
    task, factory = asyncio.current_task(), asyncio.get_running_loop().get_task_factory()
    with pytest.raises(Permanent) as refused:
        await driver.advance(port)
    driver.close()
    assert (asyncio.current_task(), asyncio.get_running_loop().get_task_factory()) == (task, factory)
    await asyncio.sleep(0.03)  # a timer of the code, or a task that it began, would act now
    assert ran == []
    assert refused.value.code == "workflow_awaits"
    return refused.value.message


@pytest.mark.parametrize("code", LIMITS)
async def test_a_limit_of_time_that_could_not_end_the_wait_is_refused(code: Code) -> None:
    """asyncio.timeout took the task of the attempt for the workflow's, which waits without any: it waited for ever."""
    message = await refusal_of(code)
    assert "asyncio.timeout" in message
    assert "ctx.wait_for(..., timeout=...)" in message


@pytest.mark.parametrize("code", TASKS)
@pytest.mark.parametrize("in_worker", [True, False])
async def test_a_task_of_asyncio_is_refused_and_does_not_run(code: Code, *, in_worker: bool) -> None:
    """It ran beside the workflow at each replay, or nobody had its result."""
    if in_worker:
        with exits_contained():  # the worker's task factory
            message = await refusal_of(code)
    else:
        message = await refusal_of(code)
    assert "asyncio.create_task" in message
    assert "ctx.gather" in message


@pytest.mark.parametrize("code", [waits_for, begins_a_group_by_anyio])
async def test_what_needs_a_task_in_either_way_is_refused(code: Code) -> None:
    """By Python 3.11, asyncio.wait_for makes a task; later, it sets a limit for the present one."""
    assert "asyncio" in await refusal_of(code)


@pytest.mark.parametrize("code", [cancels_itself, hears_of_its_end, takes_a_cancel_back])
async def test_the_task_of_the_attempt_is_out_of_reach(code: Code) -> None:
    assert "asyncio.current_task" in await refusal_of(code)


@pytest.mark.parametrize("code", AWAITS)
async def test_what_else_it_awaits_is_refused_and_the_context_s_own_waits_are_named(code: Code) -> None:
    message = await refusal_of(code)
    assert all(words in message for words in ("ctx.sleep", "ctx.gather", "ctx.run", "ctx.call")), message


async def test_a_limit_of_time_around_a_function_is_refused_before_the_function_is_called() -> None:
    """It cancelled the attempt, whose retry called the function again."""

    async def code(ctx: Context) -> None:
        async with asyncio.timeout(0.01):
            await ctx.call(partial(asyncio.sleep, 0.05))

    port = Port()
    with pytest.raises(Permanent, match=r"asyncio\.timeout"):
        await driven(port, code)
    assert port.called == []


async def test_a_function_under_ctx_call_has_a_task_of_its_own() -> None:
    async def works() -> list[str]:
        task = asyncio.current_task()
        assert isinstance(task, asyncio.Task)
        results = list(await asyncio.gather(asyncio.sleep(0, "a"), asyncio.wait_for(asyncio.sleep(0, "b"), 5)))
        async with asyncio.TaskGroup() as group:
            results.append(await group.create_task(asyncio.sleep(0, "c")))
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            results.append("in time")
        return results

    async def code(ctx: Context) -> Any:
        return [*await ctx.call(works), *(await ctx.gather(ctx.call(works), ctx.call(works)))[0]]

    assert await driven(Port(), code) == ["a", "b", "c", "in time"] * 2


async def test_code_that_only_looks_at_its_task_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Logging does, from Python 3.12 on."""

    async def code(ctx: Context) -> str:
        task = asyncio.current_task()
        assert task is not None
        logging.getLogger(__name__).warning("it is %s", task.get_name())
        await ctx.sleep(5)
        return task.get_name()

    name = asyncio.current_task().get_name()  # type: ignore[union-attr]
    assert await driven(Port(entry("sleep", "sleep", seconds=0.0)), code) == name
    assert caplog.messages == [f"it is {name}"]


async def test_a_block_that_the_worker_closes_begins_no_task() -> None:
    """A `finally` runs when the worker drops the workflow from its memory."""

    @asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        try:
            yield
        finally:
            asyncio.create_task(effect())  # noqa: RUF006 - it is refused

    async def code(ctx: Context) -> None:
        async with resource():
            await ctx.sleep(5)

    ran.clear()
    driver, port = driver_of(code)
    await driver.advance(port)
    asyncio.get_running_loop().call_soon(driver.close)  # as the worker does: in no task
    await asyncio.sleep(0.01)
    assert ran == []


def test_a_driver_is_closed_without_a_loop_too() -> None:
    ended: list[str] = []

    async def code(ctx: Context) -> None:
        try:
            await ctx.sleep(5)
        finally:
            ended.append("closed")

    driver, port = driver_of(code)
    asyncio.run(driver.advance(port))
    driver.close()
    assert ended == ["closed"]


@pytest.mark.parametrize("what", ["a signal", "a function"])
async def test_a_worker_fails_the_run_at_once_and_calls_nothing(runs: Runs, worker_of: Start, what: str) -> None:
    shop.ran.clear()
    await worker_of()
    run = await runs.submit(shop.limits_by_asyncio, what)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "workflow_awaits")
    assert "asyncio.timeout" in error["message"]
    assert shop.ran == []
    assert await runs.connection.fetchval("SELECT max(attempt) FROM task WHERE job_id = $1", run) == 1


async def test_a_workflow_that_undoes_its_work_meets_the_same() -> None:
    async def code(ctx: Context) -> None:
        try:
            await ctx.sleep(5)
        except Cancelled:
            async with asyncio.timeout(0.01):
                await ctx.call(note)

    port = Port()
    port.cancelled = lambda: True  # type: ignore[method-assign]
    with pytest.raises(Permanent, match=r"asyncio\.timeout"):
        await driven(port, code)
    assert port.called == []
