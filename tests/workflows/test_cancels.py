"""A cancelled workflow sees the cancel where it waits, and undoes its work before its run ends."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest

from leasehold.app.workflow import Workflow
from leasehold.transitions import jobs, sweeps
from tests.factories import Rows, assert_history
from tests.support.seeds import seed_of_this_commit
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start
from tests.workflows.life import Deaths, Life
from tests.workflows.promises import assert_journal

MEMORY = pytest.mark.parametrize("memory", [1000, 0], ids=["kept", "replayed"])


def undone() -> list[str]:
    return [what for name, what in shop.ran if name == "undo"]


async def logged(runs: Runs, run: UUID) -> str:
    statement = "SELECT string_agg(lines::text, '') FROM job_log WHERE job_id = $1"
    return str(await runs.connection.fetchval(statement, run))


async def waiting(runs: Runs, workflow: Workflow, kind: str, *args: Any) -> UUID:
    """A run whose workflow waits for a call of the kind."""
    shop.ran.clear()
    run = await runs.submit(workflow, *args)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = $2)", kind)
    await runs.waits(run)
    return run


@MEMORY
@pytest.mark.parametrize("kind", ["sleep", "signal", "run", "result", "limited", "gather"])
async def test_a_workflow_that_waits_sees_the_cancel_where_it_waits_and_undoes_its_work(
    runs: Runs, worker_of: Start, memory: int, kind: str
) -> None:
    await worker_of(workflow_memory=memory)
    awaited = {"gather": "sleep", "limited": "result"}.get(kind, kind)
    run = await waiting(runs, shop.undoes_a_wait, awaited, kind)
    assert await runs.cancel(run) == "cancel_requested"
    assert await runs.cancel(run) is None
    assert (await runs.ended(run))[0] == "cancelled"
    assert undone() == ["first", "second"]
    assert [row[2:] for row in (await runs.journal(run)) if row[2] == "call" and row[3] == "_undo"] == [
        ("call", "_undo", "done")
    ] * 2
    await assert_journal(runs.connection, run)


@MEMORY
@pytest.mark.parametrize("end", ["cancel", "signal"])
async def test_a_sleep_that_was_over_stays_over_when_the_clock_of_postgresql_goes_back(
    runs: Runs, worker_of: Start, memory: int, end: str
) -> None:
    """A replay that waited in the sleep again would not reach the wait where the cancel or the signal finds it."""
    await worker_of(workflow_memory=memory)
    run = await waiting(runs, shop.undoes_after_a_sleep, "signal")
    await runs.connection.execute(  # by an hour
        "UPDATE journal SET due_at = due_at + interval '1 hour' WHERE job_id = $1 AND kind = 'sleep'", run
    )
    if end == "cancel":
        await runs.cancel(run)
        assert (await runs.ended(run))[0] == "cancelled"
        assert undone() == ["slept"]
    else:
        await runs.signal(run, "go", {"by": "b"})
        assert await runs.ended(run) == ("succeeded", "done")
        assert undone() == []
    await assert_journal(runs.connection, run)


@MEMORY
async def test_each_branch_of_a_gather_meets_the_cancel(runs: Runs, worker_of: Start, memory: int) -> None:
    await worker_of(workflow_memory=memory)
    run = await waiting(runs, shop.undoes_branches, "signal")
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    assert sorted(undone()) == ["a", "b", "both"]


async def test_what_undoes_the_work_may_be_a_run_that_outlives_this_one(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await waiting(runs, shop.refunds, "signal")
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    child = await runs.connection.fetchval("SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'start'", run)
    assert await runs.ended(child) == ("succeeded", 4)
    assert await runs.steps(run) == {}


@MEMORY
@pytest.mark.parametrize("how", ["results", "a gather of results", "a failure"])
async def test_a_cancel_is_raised_where_a_gather_is_awaited_and_is_neither_a_result_nor_hidden_by_a_failure(
    runs: Runs, worker_of: Start, memory: int, how: str
) -> None:
    await worker_of(workflow_memory=memory)
    run = await waiting(runs, shop.refunds_a_gather, "signal", how)
    if how == "a failure":
        await runs.until(run, "EXISTS (SELECT 1 FROM task t WHERE t.job_id = j.id AND t.status = 'failed')")
        await runs.waits(run)
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    assert undone() == []
    child = await runs.connection.fetchval("SELECT child_id FROM journal WHERE job_id = $1 AND kind = 'start'", run)
    assert child is not None
    assert await runs.ended(child) == ("succeeded", 4)
    await assert_journal(runs.connection, run)


async def test_a_workflow_that_only_calls_functions_meets_the_cancel_at_one_of_them(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of()
    shop.ran.clear()
    run = await runs.submit(shop.keeps_on)
    await runs.until(run, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id)")
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    assert undone() == ["loop"]
    assert len(shop.ran) < shop.MANY


@MEMORY
async def test_what_a_cancelled_run_cannot_start_any_more_is_refused_where_its_undoing_awaits_it(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await waiting(runs, shop.undoes_by_waiting, "signal", shop.Order(id=1))
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    assert undone() == ["run charge", "sleep sleep", "signal more", "start charge", "run charge"]
    assert await runs.steps(run) == {}
    assert "the cleanup after the cancel failed: NotWhileUndoing: run charge" in await logged(runs, run)
    await assert_journal(runs.connection, run)


@pytest.mark.parametrize(
    ("unprintable", "reason"), [(False, "ValueError: no refund"), (True, "Unprintable: its message cannot be read")]
)
async def test_an_undoing_that_fails_ends_the_run_as_cancelled_and_the_log_says_why(
    runs: Runs, worker_of: Start, *, unprintable: bool, reason: str
) -> None:
    await worker_of()
    run = await waiting(runs, shop.undoes_badly, "signal", unprintable)
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    assert f"the cleanup after the cancel failed: {reason}" in await logged(runs, run)


async def test_an_undoing_that_takes_longer_than_the_grace_is_ended(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await waiting(runs, shop.undoes_for_ever, "signal")
    assert await runs.connection.fetchval("SELECT grace_seconds FROM job WHERE id = $1", run) == 3
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    assert ("forever", None) in shop.ran


async def test_without_a_worker_the_sweep_ends_the_run_after_the_grace(runs: Runs, worker_of: Start) -> None:
    worker = await worker_of()
    run = await waiting(runs, shop.undoes, "sleep")
    await worker.__aexit__()
    assert await runs.cancel(run) == "cancel_requested"
    assert await sweeps.end_cancels(runs.connection, [], 5) == []
    await runs.connection.execute("UPDATE job SET cancel_by = clock_timestamp() WHERE id = $1", run)
    (ended,) = await sweeps.end_cancels(runs.connection, [], 5)
    assert ended.outcome == "cancelled"
    assert (await runs.ended(run))[0] == "cancelled"
    await worker.__aenter__()


async def test_a_deadline_ends_a_workflow_that_sees_its_cancel(runs: Runs) -> None:
    life = Life(runs, False, random.Random(0), Deaths())
    run = await runs.submit(shop.undoes)
    (claimed,) = await life.due()
    await life.drive(claimed, ())
    assert await runs.cancel(run) == "cancel_requested"
    await runs.connection.execute("UPDATE job SET deadline_at = clock_timestamp() WHERE id = $1", run)
    await sweeps.expire_jobs(runs.connection)
    assert (await runs.ended(run))[0] == "expired"
    assert await life.due() == []


async def test_a_workflow_that_has_called_nothing_ends_at_once(runs: Runs) -> None:
    run = await runs.submit(shop.undoes)
    assert await runs.cancel(run) == "cancelled"


async def test_a_run_that_is_deleted_while_its_workflow_waits_sees_the_cancel_first(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of()
    run = await waiting(runs, shop.undoes, "sleep")
    assert await jobs.delete(runs.connection, run, "t") is None  # it has not ended: its caller cancels it
    await runs.cancel(run)
    await runs.ended(run)
    assert undone() == ["first", "second"]


async def _cancelled_at(runs: Runs, workflow: Workflow, cancel_at: int, at: int, seed: int, *, keeps: bool) -> Life:
    """One run that is cancelled at a point, and whose worker dies at another."""
    shop.ran.clear()
    life = Life(runs, keeps, random.Random(seed), Deaths(at, cancel_at))
    run = await runs.submit(workflow)
    life.deaths.cancel = lambda: life.cancel(run)
    await life.live(run, (), ["go"])
    status, result = await runs.ended(run)
    where = (cancel_at, at, seed, keeps)
    if life.asked is None or life.asked == "ended":
        assert status == "succeeded", (where, result)
    else:
        # The workflow may have ended without hearing of the cancel.
        assert status == "cancelled" or (status == "succeeded" and life.asked == "cancel_requested"), (where, result)
    if life.asked == "cancel_requested" and life.journal_then and status == "cancelled":
        calls = [row[4] for row in await runs.journal(run) if row[3] == "_undo"]
        assert set(undone()) == {"first", "second"}, (where, await runs.journal(run))
        assert calls == ["done"] * 2, where
        if not at:
            assert undone() == ["first", "second"], where
    if await runs.journal(run):
        await assert_journal(runs.connection, run)
    await assert_history(Rows(runs.connection, life.terms), run)
    return life


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "replayed"])
async def test_a_cancel_at_any_point_is_seen_whenever_the_worker_dies(runs: Runs, keeps: bool) -> None:
    seed = seed_of_this_commit()
    rng = random.Random(seed)
    points = (await _cancelled_at(runs, shop.undoes, 0, 0, seed, keeps=keeps)).deaths.reached
    assert points > 20
    for cancel_at in range(1, points + 1):
        life = await _cancelled_at(runs, shop.undoes, cancel_at, 0, seed, keeps=keeps)
        at = rng.randint(cancel_at, max(life.deaths.reached, cancel_at))
        await _cancelled_at(runs, shop.undoes, cancel_at, at, seed, keeps=keeps)
