"""Middleware runs around each attempt, and a program may run a worker of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path

import pytest

from leasehold import App, Current, DeclarationError, Retry, TaskFailed, current
from leasehold.app import processes
from leasehold.db.database import Connection
from leasehold.worker.attempts import inline
from tests.app.conftest import Serve
from tests.support.now import now

SECONDS = 60.0
ONCE = Retry(times=0)
customer: ContextVar[str] = ContextVar("customer")
events: list[str] = []
app = App("around")


@app.task(retry=ONCE)
def in_a_thread(*, fails: bool = False) -> str:
    if fails:
        raise ValueError("it")
    return customer.get()


@app.middleware
async def outer(attempt: Current) -> AsyncIterator[None]:
    assert current().run_id == attempt.run_id
    customer.set(f"customer of {attempt.task}")
    events.append(f"outer {attempt.number}")
    try:
        yield
    except Exception as error:
        events.append(f"outer saw {type(error).__name__}")
        raise
    events.append("outer end")


@app.middleware
async def inner(attempt: Current) -> AsyncIterator[None]:
    events.append("inner")
    yield


@app.task(retry=ONCE)
async def in_the_loop() -> str:
    return customer.get()


swallowing = App("swallowing")


@swallowing.middleware
async def swallow(attempt: Current) -> AsyncIterator[None]:
    with suppress(ValueError):
        yield


@swallowing.task(retry=Retry(times=3, delay=timedelta(0)))
async def fails() -> None:
    raise ValueError("it")


async def test_middleware_runs_around_functions_of_both_kinds_in_the_order_of_declaration(
    using: Callable[..., App], serve: Serve
) -> None:
    using(app)
    async with serve(app), asyncio.timeout(SECONDS):
        for task in (in_a_thread, in_the_loop):
            events.clear()
            assert await (await task.asubmit()) == f"customer of {task.name}"
            assert events == ["outer 1", "inner", "outer end"]
        events.clear()
        with pytest.raises(TaskFailed, match="ValueError: it"):
            await (await in_a_thread.asubmit(fails=True))
        assert events == ["outer 1", "inner", "outer saw ValueError"]


async def test_a_middleware_that_swallows_an_error_fails_the_run_and_is_named(
    using: Callable[..., App], serve: Serve
) -> None:
    using(swallowing)
    async with serve(swallowing), asyncio.timeout(SECONDS):
        with pytest.raises(TaskFailed, match="middleware_error"):
            await (await fails.asubmit())


async def test_a_program_runs_a_worker_of_its_own(using: Callable[..., App]) -> None:
    using(app)
    async with asyncio.timeout(SECONDS), app.serving():
        assert await (await in_the_loop.asubmit()) == "customer of around.in_the_loop"


async def test_a_worker_of_a_program_leaves_no_thread_behind(using: Callable[..., App]) -> None:
    """A program that started a worker again and again, such as a suite of tests, kept the threads of each."""

    def threads_of_handlers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("handler-")}

    using(app)
    before = threads_of_handlers()
    async with asyncio.timeout(SECONDS), app.serving():
        assert await (await in_a_thread.asubmit()) == "customer of around.in_a_thread"
        (own,) = threads_of_handlers() - before
    await asyncio.to_thread(own.join, SECONDS)
    assert not own.is_alive()


async def test_a_worker_of_a_program_that_an_operator_drains_claims_nothing_more_and_the_block_goes_on(
    using: Callable[..., App],
) -> None:
    using(app)
    async with asyncio.timeout(SECONDS), app.serving() as worker:
        assert now(worker.health.is_ready)
        worker.retired.set()  # as the heartbeat does
        while now(worker.health.is_ready):
            await asyncio.sleep(0.01)
        await worker.parts.slot_pools.finished()
        run = await in_the_loop.asubmit()
        await asyncio.sleep(0.3)
        assert await run.astatus() in ("pending", "queued")


async def test_a_program_whose_worker_cannot_load_a_task_sees_the_error(using: Callable[..., App]) -> None:
    """The block went on, and the worker, which had drained, executed no run any more."""
    nowhere = App("nowhere")  # no global variable of a module: no other process can import it
    nowhere.task(retry=ONCE)(quick_one)
    nowhere.task(isolated=True, name="apart")(quick_one)
    using(nowhere)
    async with asyncio.timeout(SECONDS):
        with pytest.raises(DeclarationError):
            async with nowhere.serving():
                await asyncio.Event().wait()


def quick_one() -> None: ...


crowded = App("crowded")
go_on = threading.Event()


@crowded.middleware
async def count(attempt: Current) -> AsyncIterator[None]:
    events.append(attempt.task)
    yield


@crowded.task
def hold() -> None:
    go_on.wait(2 * SECONDS)


@crowded.task
def quick() -> str:
    return "quick"


@crowded.task(process=True)
def hold_process(until: str) -> None:
    while not Path(until).exists():
        time.sleep(0.05)


@crowded.task(process=True)
def quick_process() -> str:
    return "quick"


@pytest.mark.parametrize("in_process", [False, True], ids=["thread", "process"])
async def test_an_attempt_that_found_no_room_snoozes_outside_of_the_middleware(
    using: Callable[..., App],
    serve: Serve,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    in_process: bool,
) -> None:
    monkeypatch.setattr(inline, "_ROOM_SECONDS", 0.1)
    monkeypatch.setattr(processes, "WAIT_SECONDS", 0.1)
    using(crowded)
    events.clear()
    go_on.clear()
    released = tmp_path / "released"
    task = quick_process if in_process else quick
    async with serve(crowded, worker_threads=1, worker_children=1), asyncio.timeout(SECONDS):
        holding = await (hold_process.asubmit(str(released)) if in_process else hold.asubmit())
        while not events:
            await asyncio.sleep(0.01)
        run = await task.asubmit()
        while not await connection.fetchval("SELECT count(*) FROM task WHERE status = 'waiting'"):
            await asyncio.sleep(0.02)
        assert events == [hold_process.name if in_process else hold.name]
        go_on.set()
        released.touch()
        assert await run == "quick"
        await holding
    assert events[1:] == [task.name]


failing = App("failing")


@failing.middleware
async def fail_first(attempt: Current) -> AsyncIterator[None]:
    if attempt.number == 1:
        raise ConnectionError("before the function")
    yield


@failing.task(retry=Retry(times=1, delay=timedelta(0)))
def in_the_only_thread() -> str:
    return "done"


@failing.task(process=True, retry=Retry(times=1, delay=timedelta(0)))
def in_the_only_process() -> str:
    return "done"


async def test_a_middleware_that_fails_first_keeps_no_thread_and_no_process(
    using: Callable[..., App], serve: Serve
) -> None:
    using(failing)
    async with serve(failing, worker_threads=1, worker_children=1), asyncio.timeout(SECONDS):
        for task in (in_the_only_thread, in_the_only_process):
            assert await (await task.asubmit()) == "done"


def test_what_is_no_async_generator_is_refused() -> None:
    async def plain(attempt: Current) -> None: ...

    for declare in (App("a").middleware, App("a").lifespan):
        with pytest.raises(DeclarationError, match=r"test_around\.py:\d+: a .* is an async def with one yield"):
            declare(plain)  # type: ignore[arg-type]  # that is the test
