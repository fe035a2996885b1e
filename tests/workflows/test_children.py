"""Runs that a workflow starts: awaited, cancelled with it, or detached."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.db.database import Connection, connect
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Cancelled
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.transitions import concurrency, jobs, limits, sweeps
from leasehold.transitions.runs import CreatedRuns, NewRun
from leasehold.transitions.workflows import children
from leasehold.transitions.workflows.reading import Journal
from leasehold.transitions.workflows.records import Call
from leasehold.workflows.context import Context
from leasehold.workflows.driver import Driver
from tests.support.lock_waits import until_waiting
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start
from tests.workflows.life import Deaths, Life


async def test_a_workflow_waits_for_the_result_of_a_run_of_its_own(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.starts)
    assert await runs.ended(run) == ("succeeded", "7: 5")
    assert [row[1:4] for row in await runs.journal(run)] == [(1, "start", "checkout"), (2, "result", "checkout")]


@pytest.mark.parametrize("workflow", [shop.starts_large, shop.starts_reader])
async def test_a_large_result_of_a_run_of_its_own_comes_from_the_object_store(
    runs: Runs, worker_of: Start, workflow: Any
) -> None:
    await worker_of()
    size = 200_000
    expected = size if workflow is shop.starts_large else {"output": "result.json"}
    assert await runs.ended(await runs.submit(workflow, size)) == ("succeeded", expected)


async def test_a_started_run_is_cancelled_with_its_workflow_unless_it_is_detached(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.starts_both)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(run)
    bound, detached = [
        row["child_id"]
        for row in await runs.connection.fetch(
            "SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'start' ORDER BY number", run
        )
    ]
    await runs.cancel(run)
    status, _ = await runs.ended(bound)
    assert status == "cancelled"
    assert await runs.connection.fetchval("SELECT finished_at IS NULL FROM job WHERE id = $1", detached)
    await runs.cancel(detached)


async def test_a_retried_workflow_is_told_why_the_run_that_it_awaits_is_cancelled(runs: Runs, worker_of: Start) -> None:
    """It was cancelled with the workflow, and a cancel is final: the error names the way out."""
    await worker_of()
    run = await runs.submit(shop.works_beside_its_child, 61)
    assert (await runs.ended(run))[0] == "failed"
    child = await runs.connection.fetchval("SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'start'", run)
    assert (await runs.ended(child))[0] == "cancelled"
    shop.repaired.add(61)
    assert await jobs.replay(runs.connection, run, "t") is not None
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "cancelled")
    assert f"its workflow, run {run}, is failed; a retry" in error["message"]
    assert "a rerun starts it anew" in error["message"]


async def test_the_result_of_a_run_that_is_deleted_meanwhile_is_an_error_and_no_endless_wait(
    runs: Runs, worker_of: Start
) -> None:
    run = await runs.submit(shop.slow_child)  # a run that does not end meanwhile
    first = await worker_of()
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'result')")
    await first.__aexit__()
    await runs.connection.execute("DELETE FROM job WHERE id = (SELECT child_id FROM journal WHERE kind = 'result')")
    await worker_of()
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "run_deleted")


async def _child_of(runs: Runs, run: UUID) -> UUID:
    child: UUID = await runs.connection.fetchval(
        "SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'start'", run
    )
    return child


WAITS_FOR_GO = "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal' AND e.state = 'open')"


async def test_a_run_that_failed_and_is_retried_changes_nothing_in_a_workflow_that_has_gone_on(
    runs: Runs, worker_of: Start
) -> None:
    """A replay takes the failure from the journal, which has the calls that followed."""
    await worker_of(workflow_memory=0)
    shop.repaired.clear()
    run = await runs.submit(shop.survives_its_child, 21)
    await runs.until(run, WAITS_FOR_GO)
    child = await _child_of(runs, run)
    shop.repaired.add(21)
    await jobs.replay(runs.connection, child, "t")
    assert await runs.ended(child) == ("succeeded", 21)
    await runs.signal(run, "go", 7)
    status, results = await runs.ended(run)
    assert (status, results) == ("succeeded", ["broken", "42", "7"])


async def test_a_workflow_that_has_the_result_of_a_run_needs_the_run_no_longer(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    shop.repaired.add(23)
    run = await runs.submit(shop.survives_its_child, 23)
    await runs.until(run, WAITS_FOR_GO)
    assert [row[2:] for row in await runs.journal(run)] == [
        ("start", "unreliable", "done"), ("result", "unreliable", "done"), ("signal", "go", "open"),
    ]  # fmt: skip


async def test_a_run_that_failed_and_is_retried_is_cancelled_with_its_workflow(runs: Runs, worker_of: Start) -> None:
    worker = await worker_of(workflow_memory=0)
    shop.repaired.clear()
    run = await runs.submit(shop.survives_its_child, 21)
    await runs.until(run, WAITS_FOR_GO)
    await worker.__aexit__()
    child = await _child_of(runs, run)
    await children.close_calls(runs.connection)
    await jobs.replay(runs.connection, child, "t")
    assert await runs.cancel(run) == "cancel_requested"
    await children.cancel_orphans(runs.connection)
    assert await jobs.state_of(runs.connection, child) == "cancelled"


async def test_a_run_that_is_retried_after_its_workflow_has_failed_is_not_cancelled_with_it(
    runs: Runs, worker_of: Start
) -> None:
    """Even if it is retried before the duty has closed the call with which it was started."""
    worker = await worker_of(workflow_memory=0)
    shop.repaired.clear()
    run = await runs.submit(shop.starts_unreliable, 5)
    assert (await runs.ended(run))[0] == "failed"
    await worker.__aexit__()
    await runs.connection.execute("UPDATE journal SET state = 'open' WHERE job_id = $1 AND kind = 'start'", run)
    child = await _child_of(runs, run)
    await jobs.replay(runs.connection, child, "t")
    assert await children.cancel_orphans(runs.connection) == ([], [], False)
    assert await jobs.state_of(runs.connection, child) == "queued"


async def test_a_workflow_that_failed_with_its_run_reads_the_result_after_both_are_retried(
    runs: Runs, worker_of: Start
) -> None:
    """It has made no call since: nothing depends on the failure."""
    await worker_of(workflow_memory=0)
    shop.repaired.clear()
    run = await runs.submit(shop.starts_unreliable, 5)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "broken")
    shop.repaired.add(5)
    child = await _child_of(runs, run)
    await jobs.replay(runs.connection, child, "t")
    assert await runs.ended(child) == ("succeeded", 5)
    await jobs.replay(runs.connection, run, "t")
    assert await runs.ended(run) == ("succeeded", 5)


async def _retried_with_its_child(runs: Runs, worker_of: Start, order: str) -> tuple[UUID, UUID]:
    """A workflow that has failed with the run that it awaits. Both are retried, and it waits for the run again."""
    worker = await worker_of(workflow_memory=0)
    shop.repaired.clear()
    run = await runs.submit(shop.awaits_a_listener, 5)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "broken")
    await worker.__aexit__()
    await children.close_calls(runs.connection)  # what the duty does, if it has not done so yet
    shop.repaired.add(5)
    child = await _child_of(runs, run)
    if order == "together":
        await jobs.replay_together(runs.connection, [run, child], "t")
    else:
        for job_id in (child, run) if order == "the run first" else (run, child):
            assert await jobs.replay(runs.connection, job_id, "t") is not None
    await worker_of(workflow_memory=0)
    await runs.waits(run)
    await runs.until(child, WAITS_FOR_GO)
    return run, child


ORDERS = pytest.mark.parametrize("order", ["together", "the run first", "the workflow first"])


@ORDERS
async def test_a_workflow_that_is_retried_with_the_run_that_it_awaits_is_woken_by_its_end(
    runs: Runs, worker_of: Start, order: str
) -> None:
    run, child = await _retried_with_its_child(runs, worker_of, order)
    await runs.signal(child, "go", 7)
    assert await runs.ended(run) == ("succeeded", 7)


@ORDERS
async def test_a_run_that_is_retried_with_its_workflow_is_cancelled_with_it_again(
    runs: Runs, worker_of: Start, order: str
) -> None:
    run, child = await _retried_with_its_child(runs, worker_of, order)
    assert await runs.cancel(run) == "cancel_requested"
    assert (await runs.ended(child))[0] == "cancelled"


@pytest.mark.parametrize("succeeds", [True, False])
async def test_a_result_that_a_workflow_has_read_stays_when_its_run_is_deleted(
    runs: Runs, worker_of: Start, *, succeeds: bool
) -> None:
    first = await worker_of(workflow_memory=0)
    shop.repaired.clear()
    if succeeds:
        shop.repaired.add(21)
    run = await runs.submit(shop.survives_its_child, 21)
    await runs.until(run, WAITS_FOR_GO)
    await first.__aexit__()
    child = await _child_of(runs, run)
    ended_at = await runs.connection.fetchval("SELECT finished_at FROM job WHERE id = $1", child)
    assert await jobs.delete(runs.connection, child, "t") is not None
    await sweeps.forget_jobs(runs.connection, [child])
    assert await runs.connection.fetchval("SELECT count(*) FROM job WHERE id = $1", child) == 0
    await runs.signal(run, "go", 7)
    await worker_of(workflow_memory=0)
    status, results = await runs.ended(run)
    expected = ["21", ended_at.isoformat()] if succeeds else ["broken", "42"]
    assert (status, results) == ("succeeded", [*expected, "7"])


async def test_a_cancel_meets_a_workflow_where_it_waits_whatever_became_of_a_run_that_it_had_seen_fail(
    runs: Runs, worker_of: Start
) -> None:
    first = await worker_of(workflow_memory=0)
    shop.repaired.clear()
    shop.ran.clear()
    run = await runs.submit(shop.survives_its_child, 21)
    await runs.until(run, WAITS_FOR_GO)
    await first.__aexit__()
    child = await _child_of(runs, run)
    await jobs.replay(runs.connection, child, "t")
    assert await runs.cancel(run) == "cancel_requested"
    assert await runs.cancel(child) == "cancelled"
    await worker_of(workflow_memory=0)
    assert (await runs.ended(run))[0] == "cancelled"
    assert shop.ran == [("undo", "broken")]


Started = CreatedRuns | None


@pytest.mark.parametrize("commits", [False, True], ids=["before the commit", "after the commit"])
async def test_a_connection_that_breaks_while_a_run_starts_costs_the_workflow_nothing(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch, *, commits: bool
) -> None:
    start, breaks = children.start, iter([True])

    async def breaking(connection: Connection, *arguments: Any, **options: Any) -> Started:
        created = await start(connection, *arguments, **options)
        if next(breaks, False):
            if commits:
                await connection.execute("COMMIT")
            raise ConnectionResetError
        return created

    monkeypatch.setattr(children, "start", breaking)
    await worker_of()
    run = await runs.submit(shop.starts)
    assert await runs.ended(run) == ("succeeded", "7: 5")
    assert await runs.connection.fetchval("SELECT count(*) FROM failure") == 0
    assert await runs.connection.fetchval("SELECT count(*) FROM job") == 2
    assert next(breaks, None) is None


async def test_a_connection_that_breaks_before_a_started_run_is_admitted_costs_the_workflow_nothing(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading worker admits the run a little later."""
    await limits.declare(runs.connection, [shop.checkout.pipeline], ConcurrencyLimit("t", "tenant", at_most=5))
    admit, breaks = concurrency.admit, iter([True])

    async def breaking(*arguments: Any) -> Any:
        if next(breaks, False):
            raise ConnectionResetError
        return await admit(*arguments)

    monkeypatch.setattr(concurrency, "admit", breaking)
    await worker_of()
    run = await runs.submit(shop.starts)
    assert await runs.ended(run) == ("succeeded", "7: 5")
    assert await runs.connection.fetchval("SELECT count(*) FROM failure") == 0


async def _starting(runs: Runs) -> tuple[UUID, Lease, Call, NewRun]:
    """A workflow that a worker has claimed, and the call with which it starts a run."""
    run = await runs.submit(shop.starts)
    (claimed,) = await Life(runs, False, random.Random(0), Deaths()).due()
    call = Call("", 1, "start", "checkout", child=new_id())
    assert call.child is not None
    return run, claimed.lease, call, shop.checkout.runnable.new_run(call.child, "t", {"order": {"id": 7}}, 3600)


async def test_a_start_is_repeated_while_the_commit_of_the_first_try_is_under_way(
    runs: Runs, settings: Settings
) -> None:
    """As when the client's connection breaks during the commit: PostgreSQL ends it, and holds the locks until then."""
    run, lease, call, new = await _starting(runs)
    other = await connect(settings, "tests")

    async def again() -> Started:
        async with other.transaction():
            return await children.start(other, lease, call, new)

    try:
        async with runs.connection.transaction():
            assert (await children.start(runs.connection, lease, call, new) or CreatedRuns([], [])).hints
            second = asyncio.create_task(again())
            await until_waiting(runs.connection)
        assert await second == CreatedRuns([], [])
    finally:
        await other.close()
    assert [row[1:4] for row in await runs.journal(run)] == [(1, "start", "checkout")]


async def test_a_cancel_between_two_tries_of_a_start_does_not_take_the_run_from_the_workflow(runs: Runs) -> None:
    """A replay finds the run in the journal, so the workflow must go on with it now, too."""
    run, lease, call, new = await _starting(runs)
    async with runs.connection.transaction():
        await children.start(runs.connection, lease, call, new)
    assert await runs.cancel(run) == "cancel_requested"
    async with runs.connection.transaction():
        assert await children.start(runs.connection, lease, call, new) == CreatedRuns([], [])


class SlowJournal:
    """A port whose commits take their time. `cancels`: the run is being cancelled, and its workflow does not know."""

    def __init__(self, *, cancels: bool) -> None:
        self.cancels = cancels
        self.recorded: list[str] = []
        self.started: list[tuple[str, list[str]]] = []  # the run, and what the journal had when it started

    async def read(self, _places: object) -> Journal:
        began = datetime(2026, 1, 1, tzinfo=UTC)
        return Journal(news=0, started_at=began, version=1, entries=[], signals=[], read_at=began)

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        for _ in range(5):
            await asyncio.sleep(0)
        if self.cancels and not cancelling:
            return False
        self.recorded += [f"{call.kind} {call.state}" for call in calls]
        return True

    async def start(self, call: Any, _record: Call, _wait: Call | None = None, *, again: bool = False) -> bool:
        self.started.append((call.name, list(self.recorded)))
        return True

    def cancelled(self) -> bool:
        return False

    def check(self) -> None: ...


async def _starts_two(ctx: Context) -> None:
    ctx.patched("a row that is not committed")
    await ctx.gather(ctx.detached.start(shop.approved, None), ctx.detached.start(shop.checkout, shop.SEVEN))


async def test_each_of_several_runs_starts_once_the_calls_before_it_are_committed() -> None:
    """Else a replay after the worker's death would find the run, and not the way that led to it."""
    port: Any = SlowJournal(cancels=False)
    outcome = await Driver(uuid4(), lambda it: _starts_two(Context(it)), 100).advance(port)
    assert outcome.ended
    assert port.started == [("approved", ["patch done"]), ("checkout", ["patch done"])]


async def test_no_run_starts_after_calls_that_the_cancel_has_refused() -> None:
    port: Any = SlowJournal(cancels=True)
    with pytest.raises(Cancelled):
        await Driver(uuid4(), lambda it: _starts_two(Context(it)), 100).advance(port)
    assert port.started == []
