"""`ctx.run` of a task with a limit: a run of its own does the work, so that the limit holds.."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.transitions import jobs, limits
from leasehold.workflows.context import Context
from leasehold.workflows.driver import Driver
from tests.workflows import shop
from tests.workflows.conftest import Runs, Start
from tests.workflows.test_calls import CHILD, Port, entry


@pytest.fixture(autouse=True)
def _forget() -> None:
    shop.ran.clear()
    shop.repaired.clear()
    shop.alone_now.update(now=0, most=0)


AWAITS_A_RUN = "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'result')"


async def _children(runs: Runs, run: UUID) -> list[dict[str, Any]]:
    rows = await runs.connection.fetch(
        "SELECT c.id, c.status, c.priority, c.notify FROM journal e JOIN job c ON c.id = e.child_id"
        " WHERE e.job_id = $1 AND e.kind = 'start' ORDER BY e.branch, e.number",
        run,
    )
    return [dict(row) for row in rows]


@pytest.mark.parametrize("memory", [1000, 0])
async def test_a_limit_holds_for_the_steps_of_a_gather(runs: Runs, worker_of: Start, memory: int) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.gathers_alone, 5)
    assert await runs.ended(run) == ("succeeded", [0, 2, 4, 6, 8])
    assert shop.alone_now["most"] == 1
    assert sorted(number for _, number in shop.ran) == [0, 1, 2, 3, 4]
    assert len(await _children(runs, run)) == 5
    assert await runs.steps(run) == {}


async def test_a_limit_holds_for_the_steps_of_several_workflows_and_runs(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    workflows = [await runs.submit(shop.gathers_alone, 2) for _ in range(3)]
    for run in workflows:
        assert await runs.ended(run) == ("succeeded", [0, 2])
    assert shop.alone_now["most"] == 1


@pytest.mark.parametrize("memory", [1000, 0])
async def test_tasks_with_and_without_a_limit_stand_beside_each_other(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.branches_alone, 3)
    assert await runs.ended(run) == ("succeeded", [200, 0, 4, 8, 200])
    assert shop.alone_now["most"] == 1
    assert set((await runs.steps(run)).values()) == {"succeeded"}
    assert len(await runs.steps(run)) == len(await _children(runs, run)) == 4


async def test_a_failure_is_that_of_a_step(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    run = await runs.submit(shop.refused_both_ways, "stolen")
    assert await runs.ended(run) == ("succeeded", ["TaskFailed stolen: no such card"] * 2)


async def test_a_large_result_comes_from_the_object_store(runs: Runs, worker_of: Start) -> None:
    await worker_of()
    assert await runs.ended(await runs.submit(shop.reads_large_alone, 200_000)) == ("succeeded", 200_000)


@pytest.mark.parametrize("memory", [1000, 0])
async def test_a_cancel_of_the_workflow_is_raised_at_the_call_and_cancels_the_run(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await runs.submit(shop.stuck_beside)
    await runs.until(run, AWAITS_A_RUN)
    await runs.waits(run)
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"
    (child,) = await _children(runs, run)
    assert (await runs.ended(child["id"]))[0] == "cancelled"
    assert shop.ran == [("note_cancel", None)]


async def test_a_run_that_began_before_its_task_got_a_limit_goes_on_and_so_does_one_whose_task_lost_it(
    runs: Runs, worker_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal decides. The code of earlier releases has made steps of all calls."""
    await worker_of(workflow_memory=0)
    with monkeypatch.context() as patch:
        patch.setattr(shop.alone.pipeline, "limits", ())
        old = await runs.submit(shop.alone_and_listens)
        await runs.until(old, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
        await runs.waits(old)
    new = await runs.submit(shop.alone_and_listens)
    await runs.until(new, "EXISTS (SELECT 1 FROM journal e WHERE e.job_id = j.id AND e.kind = 'signal')")
    await runs.waits(new)
    await runs.signal(old, "go", None)
    assert await runs.ended(old) == ("succeeded", [2, 4, 6])
    assert [row[:4] for row in await runs.journal(old)] == [
        ("", 1, "run", "alone"), ("", 2, "signal", "go"), ("", 3, "start", "second#1"), ("", 4, "start", "alone#2"),
        ("3/", 1, "result", "second#1"), ("4/", 1, "result", "alone#2"),
    ]  # fmt: skip
    monkeypatch.setattr(shop.alone.pipeline, "limits", ())
    await runs.signal(new, "go", None)
    assert await runs.ended(new) == ("succeeded", [2, 4, 6])
    assert [row[:4] for row in await runs.journal(new)] == [
        ("", 1, "start", "alone#1"), ("", 2, "signal", "go"), ("", 3, "run", "second"), ("", 4, "run", "alone"),
        ("1/", 1, "result", "alone#1"),
    ]  # fmt: skip
    assert sorted(number for _, number in shop.ran) == [1, 1, 2, 2, 3, 3]


async def _alone(ctx: Context) -> int:
    return await ctx.run(shop.alone, 1)


async def test_a_replay_waits_for_the_step_that_the_journal_has() -> None:
    port: Any = Port(entry("run", "alone", child=CHILD, status="running"))
    outcome = await Driver(uuid4(), lambda it: _alone(Context(it)), 100).advance(port)
    assert (outcome.ended, outcome.wakes_after_ends, port.recorded) == (False, 1, [])


async def test_limits_of_an_operator_do_not_hold_it_back(runs: Runs, worker_of: Start) -> None:
    """A step never waits at them: the workflow has its place there, and would wait for itself without end."""
    for key in ("tenant", "queue:default", "template:shop.stuck_alone"):
        await limits.declare(runs.connection, [shop.stuck_alone.pipeline], ConcurrencyLimit("t", key, at_most=1))
    await worker_of()
    run = await runs.submit(shop.stuck_beside)
    await runs.until(run, AWAITS_A_RUN)
    keys = await runs.connection.fetch("SELECT key FROM gate_job")
    assert [row["key"] for row in keys] == ["code:shop.stuck_alone"]
    await runs.cancel(run)
    assert (await runs.ended(run))[0] == "cancelled"


async def test_a_run_in_place_of_a_step_has_the_priority_of_its_workflow_and_tells_no_webhook(
    runs: Runs, worker_of: Start
) -> None:
    await worker_of()
    await runs.connection.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events, enabled)"
        " VALUES ($1, 't', 'http://x', '{}', $2, true)",
        uuid4(),
        ["run.succeeded"],
    )
    job = jobs.NewJob(shop.gathers_alone.pipeline, tenant_id="t", params={"count": 1}, priority=2)
    await jobs.submit(runs.connection, [job])
    assert await runs.ended(job.id) == ("succeeded", [0])
    (child,) = await _children(runs, job.id)
    assert (child["priority"], child["notify"]) == (2, False)


async def _failed(runs: Runs, workflow: Any, number: int) -> UUID:
    run = await runs.submit(workflow, number)
    status, error = await runs.ended(run)
    assert (status, error["code"]) == ("failed", "broken")
    shop.repaired.update((number, number + 1))
    return run


async def _failed_child(runs: Runs, run: UUID) -> UUID:
    child: UUID
    (child,) = [child["id"] for child in await _children(runs, run) if child["status"] == "failed"]
    return child


TRIES = ("unreliable_alone", 3)


@pytest.mark.parametrize("memory", [1000, 0])
async def test_a_retry_of_the_workflow_runs_the_task_again_that_failed_and_no_other(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory)
    run = await _failed(runs, shop.retries_alone, 3)
    before = await _children(runs, run)
    await jobs.replay(runs.connection, run, "t")
    assert await runs.ended(run) == ("succeeded", [6, 3, 18])
    assert sorted(shop.ran) == sorted([("alone", 3), TRIES, ("alone", 9), TRIES])
    assert [child["id"] for child in await _children(runs, run)] == [child["id"] for child in before]


ORDERS = ["the run first", "the workflow first", "together"]


@pytest.mark.parametrize("order", ORDERS)
async def test_a_retry_of_both_runs_the_task_once(runs: Runs, worker_of: Start, order: str) -> None:
    """As a bulk retry of all that failed does."""
    worker = await worker_of()
    run = await _failed(runs, shop.retries_alone, 3)
    child = await _failed_child(runs, run)
    await worker.__aexit__()
    if order == "together":
        await jobs.replay_together(runs.connection, [run, child], "t")
    elif order == "the run first":
        await jobs.replay(runs.connection, child, "t")
        await jobs.replay(runs.connection, run, "t")
    else:
        await jobs.replay(runs.connection, run, "t")
    await worker_of()
    assert await runs.ended(run) == ("succeeded", [6, 3, 18])
    assert await jobs.replay(runs.connection, child, "t") is None, "it has not failed any more"
    assert shop.ran.count(TRIES) == 2


@pytest.mark.parametrize("became", ["cancelled", "expired", "deleted"])
async def test_a_retry_of_the_workflow_starts_another_run_for_one_that_cannot_be_retried(
    runs: Runs, worker_of: Start, became: str
) -> None:
    await worker_of()
    run = await _failed(runs, shop.retries_alone, 3)
    child = await _failed_child(runs, run)
    if became == "deleted":
        await runs.connection.execute("DELETE FROM job WHERE id = $1", child)
    else:
        await runs.connection.execute("UPDATE job SET status = $2 WHERE id = $1", child, became)
    await jobs.replay(runs.connection, run, "t")
    assert await runs.ended(run) == ("succeeded", [6, 3, 18])
    assert child not in [child["id"] for child in await _children(runs, run)]
    await runs.connection.execute("UPDATE job SET status = 'failed' WHERE id = $1", child)


async def test_no_run_of_on_failure_follows_it_as_none_follows_a_step(runs: Runs, worker_of: Start) -> None:
    """The workflow handles the failure. A retry of the workflow changes nothing about that."""
    await worker_of()
    run = await _failed(runs, shop.retries_alone, 3)
    shop.repaired.clear()
    await jobs.replay(runs.connection, run, "t")
    assert (await runs.ended(run))[0] == "failed"
    assert shop.ran.count(TRIES) == 2
    assert [child["notify"] for child in await _children(runs, run)] == [False] * 3
    assert await runs.connection.fetchval("SELECT count(*) FROM job WHERE pipeline = 'shop.told'") == 0


async def test_a_retry_keeps_a_failure_after_which_the_workflow_has_made_calls(runs: Runs, worker_of: Start) -> None:
    await worker_of(workflow_memory=0)
    run = await _failed(runs, shop.falls_back, 3)
    await jobs.replay(runs.connection, run, "t")
    assert await runs.ended(run) == ("succeeded", 4)
    assert shop.ran.count(TRIES) == 1


@pytest.mark.parametrize(("step", "again"), [("alone#1", ("alone", 3)), ("unreliable_alone#1", None)])
async def test_a_retry_from_a_step_runs_this_task_again(
    runs: Runs, worker_of: Start, step: str, again: tuple[str, int] | None
) -> None:
    await worker_of()
    run = await _failed(runs, shop.retries_alone, 3)
    await jobs.replay(runs.connection, run, "t", from_step=step)
    assert await runs.ended(run) == ("succeeded", [6, 3, 18])
    assert sorted(shop.ran) == sorted([("alone", 3), TRIES, ("alone", 9), TRIES, *([again] if again else [])])
    failed = await _failed(runs, shop.falls_back, 20)
    with pytest.raises(Invalid, match="no such step"):
        await jobs.replay(runs.connection, failed, "t", from_step="alone#2")


@pytest.mark.parametrize("memory", [1000, 0])
async def test_each_call_counts_once_among_the_most_calls_of_a_workflow(
    runs: Runs, worker_of: Start, memory: int
) -> None:
    await worker_of(workflow_memory=memory, workflow_max_calls=4)
    assert await runs.ended(await runs.submit(shop.gathers_alone, 4)) == ("succeeded", [0, 2, 4, 6])
    status, error = await runs.ended(await runs.submit(shop.gathers_alone, 5))
    assert (status, error["code"]) == ("failed", "workflow_too_long")
