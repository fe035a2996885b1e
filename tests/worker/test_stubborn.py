"""A handler that catches its CancelledError and goes on keeps neither its slot, nor its lease, nor its worker."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog

from leasehold.db.pool_sizes import pool_of_worker
from leasehold.domain.errors import LeaseLost
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.settlements import Completion, Failure
from leasehold.worker import parts
from leasehold.worker.attempts import runner as runner_module
from leasehold.worker.attempts import stoppable
from leasehold.worker.attempts.stoppable import StoppableWork
from leasehold.worker.leases.settlement_batcher import CancelAcknowledged, Release, Settlement
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker import stubborn_steps
from tests.worker.conftest import SECONDS
from tests.worker.test_runner import Attempt


@pytest.fixture(autouse=True)
async def handlers_end(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(runner_module, "_MIN_STOP_SECONDS", 0.05)
    yield
    stubborn_steps.let_go()


@pytest.fixture
async def attempt() -> AsyncIterator[Stubborn]:
    """Its handler ends with the test, also with one that fails: else the event loop would wait for it for ever."""
    made = Stubborn()
    yield made
    made.go_on.set()
    await asyncio.sleep(0)  # the handler sees it before the loop ends, and cancels all tasks


class Stubborn(Attempt):
    """An attempt whose handler goes on until `go_on` is set, and then returns. The fixture `attempt` makes it."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

        async def handler(of: Any, *_: Any) -> Settlement:
            while not self.go_on.is_set():
                with suppress(asyncio.CancelledError):
                    await self.go_on.wait()
            return Completion(of.lease)

        super().__init__(handler)

    def lose(self) -> None:
        self.held.lost = True
        self.held.notify_stop()

    def outlive_its_limit(self) -> None:
        self.held.overdue = True
        self.held.notify_stop()

    def cancel(self) -> None:
        self.held.cancelled = True
        self.held.notify_cancelled()


@pytest.mark.parametrize(
    ("stop", "kind"),
    [
        (lambda attempt: attempt.lose(), type(None)),
        (lambda attempt: attempt.cancel(), CancelAcknowledged),
        (lambda attempt: attempt.runner.release(), Release),
        (lambda attempt: attempt.outlive_its_limit(), Failure),
    ],
    ids=["lost", "cancelled", "released", "overdue"],
)
async def test_an_attempt_ends_although_its_handler_does_not(
    attempt: Stubborn, stop: Callable[[Stubborn], object], kind: type
) -> None:
    running = asyncio.create_task(attempt.settlement())
    await attempt.began.wait()
    stop(attempt)
    has_ended, _ = await asyncio.wait({running}, timeout=SECONDS)
    given_up = len(attempt.runner._given_up)
    attempt.go_on.set()
    assert type(await running) is kind
    assert has_ended
    assert given_up == 1
    assert not attempt.runner._running


async def test_an_attempt_that_outlives_its_time_limit_fails_because_of_it(attempt: Stubborn) -> None:
    """Not because of the lease, which would be charged as a loss of its worker."""
    failure = await attempt.stopped(attempt.outlive_its_limit)
    attempt.go_on.set()
    assert isinstance(failure, Failure)
    assert (failure.code, failure.retryable) == ("step_timeout", True)
    assert failure.message == "the step ran longer than 300 s, and did not stop after that"
    assert attempt.told == [failure.message]


async def test_whoever_cancels_an_attempt_from_outside_does_not_wait_for_its_handler(attempt: Stubborn) -> None:
    running = asyncio.create_task(attempt.settlement())
    await attempt.began.wait()
    running.cancel()
    has_ended, _ = await asyncio.wait({running}, timeout=SECONDS)
    attempt.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert has_ended


@pytest.mark.parametrize("is_ready", [False, True])
async def test_who_is_cancelled_gets_the_result_and_a_moment_to_settle_it(
    monkeypatch: pytest.MonkeyPatch, *, is_ready: bool
) -> None:
    """`is_ready`: the work has ended in the very turn of the cancel."""
    monkeypatch.setattr(stoppable, "_SETTLE_SECONDS", 0.05)
    results: list[str] = []

    async def handler() -> str:
        with suppress(asyncio.CancelledError):
            await ready.wait()
        return "result"

    async def settles() -> None:
        results.append(await work.result())
        await asyncio.Event().wait()  # PostgreSQL does not answer

    ready = asyncio.Event()
    work = StoppableWork(handler(), SECONDS)
    settling = asyncio.create_task(settles())
    await asyncio.sleep(0)
    if is_ready:
        ready.set()
        await work.task
    settling.cancel()
    has_ended, _ = await asyncio.wait({settling}, timeout=SECONDS)
    settling.cancel()
    assert has_ended
    assert results == ["result"]


async def test_what_a_handler_returns_in_the_time_that_it_has_to_stop_counts(
    attempt: Stubborn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_MIN_STOP_SECONDS", SECONDS)
    monkeypatch.setattr(runner_module, "_MAX_STOP_SECONDS", SECONDS)

    def stop() -> None:
        attempt.runner.release()
        attempt.go_on.set()

    assert await attempt.stopped(stop) == Completion(attempt.claimed.lease)
    assert not attempt.runner._given_up


class Lent:
    """A connection of the pool. `has_ended`: the server has ended its session, so asyncpg has taken it back."""

    def __init__(self, *, has_ended: bool) -> None:
        self.has_ended = has_ended
        self.is_cut = False

    def terminate(self) -> None:
        if self.has_ended:
            raise asyncpg.InterfaceError("released")
        self.is_cut = True


async def test_a_handler_that_is_given_up_loses_each_connection_also_beside_some_whose_sessions_have_ended(
    attempt: Stubborn,
) -> None:
    connections: list[Any] = [Lent(has_ended=number % 2 == 0) for number in range(20)]
    for connection in connections:
        attempt.held.borrow(connection)
    assert await attempt.stopped(attempt.runner.release) == Release(attempt.claimed.lease)
    (task,) = attempt.runner._given_up
    attempt.go_on.set()
    await task
    assert all(connection.is_cut or connection.has_ended for connection in connections)


async def test_a_connection_that_a_handler_has_returned_is_not_cut_when_the_handler_is_given_up(
    attempt: Stubborn,
) -> None:
    """Another attempt may have it by then."""
    returned: Any = Lent(has_ended=False)
    kept: Any = Lent(has_ended=False)
    for connection in (returned, kept):
        attempt.held.borrow(connection)
    attempt.held.give_back(returned)
    assert await attempt.stopped(attempt.runner.release) == Release(attempt.claimed.lease)
    attempt.go_on.set()
    assert (returned.is_cut, kept.is_cut) == (False, True)


async def test_what_a_handler_that_was_given_up_raises_later_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = asyncio.Event()

    async def handler(*_: Any) -> Settlement:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await raised.wait()
        raise ValueError("too late")

    attempt = Attempt(handler)
    assert await attempt.stopped(attempt.runner.release) == Release(attempt.claimed.lease)
    (task,) = attempt.runner._given_up
    raised.set()
    await asyncio.wait({task}, timeout=SECONDS)
    await asyncio.sleep(0)  # its callbacks run
    assert not attempt.runner._given_up


@pytest.mark.parametrize("end", ["raises", "returns", "is cancelled"])
async def test_the_workers_log_has_what_a_handler_that_was_given_up_raises_later_and_no_other_end_of_it(
    end: str,
) -> None:
    """Nor does asyncio report an error that nobody has read."""
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, report: reports.append(report))
    go_on = asyncio.Event()

    async def handler(of: Any, *_: Any) -> Settlement:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await go_on.wait()
        if end == "raises":
            raise ValueError("too late")
        return Completion(of.lease)

    attempt = Attempt(handler)
    assert await attempt.stopped(attempt.runner.release) == Release(attempt.claimed.lease)
    (task,) = attempt.runner._given_up
    with structlog.testing.capture_logs() as lines:
        go_on.set() if end != "is cancelled" else task.cancel()
        await asyncio.wait({task}, timeout=SECONDS)
        await asyncio.sleep(0)  # its callbacks run
        del task
        gc.collect()
    errors = [line["error"] for line in lines if "was given up" in line["event"]]
    assert errors == (["ValueError: too late"] if end == "raises" else [])
    assert reports == []


def stubborn_worker(settings: Settings, tmp_path: Path) -> Worker:
    changes: dict[str, Any] = {"poll_seconds": 0.1, "work_dir": str(tmp_path), "drain_seconds": 0.0}
    return Worker(settings.model_copy(update=changes), stubborn_steps.pipelines())


async def until_connected(count: int) -> None:
    """Wait until so many attempts have got a connection of the worker's pool."""
    async with asyncio.timeout(SECONDS):
        while len(stubborn_steps.connected) < count:
            await asyncio.sleep(0.02)


async def end_sessions(rows: Rows, processes: list[int]) -> None:
    """End these sessions, and wait until the worker has seen it."""
    await rows.connection.execute("SELECT pg_terminate_backend(pid, 5000) FROM unnest($1::int[]) AS pid", processes)
    await asyncio.sleep(0.1)


async def test_a_worker_drains_and_closes_and_the_tasks_are_due_elsewhere(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its handlers have taken all connections of its pool."""
    monkeypatch.setattr(parts, "_CLOSE_SECONDS", 0.05)
    worker = stubborn_worker(settings, tmp_path)
    await worker.__aenter__()
    count = pool_of_worker(settings)
    await jobs.submit(rows.connection, [jobs.NewJob(stubborn_steps.stubborn, "t") for _ in range(count)])
    await until_connected(count)

    async def end() -> None:
        await worker.drain()
        await worker.__aexit__()

    ending = asyncio.create_task(end())
    has_ended, _ = await asyncio.wait({ending}, timeout=SECONDS)
    for attempt, _ in stubborn_steps.begun:
        with pytest.raises(LeaseLost):
            attempt.checkpoint()
    stubborn_steps.let_go()
    await ending
    assert has_ended
    tasks = await rows.connection.fetch("SELECT status, attempt, losses FROM task")
    assert [tuple(row) for row in tasks] == [("pending", 0, 0)] * count
    assert await rows.connection.fetchval("SELECT count(*) FROM worker") == 0


@pytest.mark.parametrize("have_ended", [False, True])
async def test_a_handler_that_was_given_up_loses_its_connection_and_gets_no_other(
    settings: Settings, tmp_path: Path, rows: Rows, *, have_ended: bool
) -> None:
    """A few such handlers would leave the worker no connection, to find due tasks with, for example. `have_ended`: the
    server has ended the sessions of their connections before, as idle_in_transaction_session_timeout does.
    """
    count = pool_of_worker(settings)
    async with stubborn_worker(settings, tmp_path) as worker:
        await jobs.submit(rows.connection, [jobs.NewJob(stubborn_steps.stubborn, "t") for _ in range(count)])
        await until_connected(count)
        stubborn = list(stubborn_steps.begun)
        if have_ended:
            await end_sessions(rows, stubborn_steps.connected)
        for work in list(worker.parts.runner._running):
            work.stop()
        await until_connected(2 * count)  # polls have found them again, and they have as many connections
        assert all(not task.done() for _, task in stubborn)
        assert {task for _, task in stubborn} <= worker.parts.runner._given_up
        assert await rows.connection.fetchval("SELECT max(losses) FROM task") == 0
        for attempt, _ in stubborn:
            with pytest.raises(LeaseLost):
                await attempt.value("none")
        stubborn_steps.let_go()
