"""What a cancel writes, row by row: the steps, the jobs, the history and the hints of those that it names, and of no
other.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.transitions import claims, concurrency, jobs, settlements
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Snoozing, Suspending
from tests.factories import DIAMOND, ONE, THREE, Rows, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_bystanders import state_of
from tests.transitions.test_workflows import step, suspended, wait

TRACE = {"traceparent": "00-a-b-01"}
REASON = {"reason": "r", "by": "b"}
KEPT = 3600


async def cancel(rows: Rows, *job_ids: UUID, **more: Any) -> jobs.Cancels:
    return await jobs.request_cancel(rows.connection, job_ids, "t", reason="r", by="b", **more)


async def told(rows: Rows, job_id: UUID, after: int) -> list[tuple[Any, ...]]:
    """The history of the job after the event `after`."""
    return [
        (event["kind"], event["job_status"], event["step"], event["task_status"], event["epoch"])
        for event in (await rows.events(job_id))[after:]
    ]


async def asked_of(rows: Rows, job_id: UUID) -> dict[str, Any]:
    """The cancel as the job's row has it, without its time."""
    asked = (await rows.job(job_id))["cancel"]
    assert asked.pop("at")
    return dict(asked)


async def half_done(rows: Rows) -> UUID:
    """A job with a step that succeeded, one that waits for its next attempt, one that is due, and one blocked."""
    top = await rows.leased(DIAMOND, keep_seconds=KEPT, trace=TRACE)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    left, right = sorted(await rows.claim_all(), key=lambda claimed: claimed.step)
    await settlements.fail(rows.connection, [Failure(left.lease, "error", "c", "m", True, 60.0)])
    await settlements.release(rows.connection, [right.lease])
    assert await rows.statuses(top.job_id) == {
        "top": "succeeded", "left": "retry", "right": "pending", "bottom": "blocked",
    }  # fmt: skip
    return top.job_id


async def test_a_job_whose_steps_all_wait_ends_at_once_step_by_step(rows: Rows) -> None:
    job_id = await half_done(rows)
    before = await rows.events(job_id)
    cancels = await cancel(rows, job_id)
    assert (cancels.states, cancels.hints) == ({job_id: "cancelled"}, [])
    assert [(ended.pipeline, ended.outcome) for ended in cancels.ended] == [("diamond", "cancelled")]
    assert await rows.statuses(job_id) == {
        "top": "succeeded", "left": "cancelled", "right": "cancelled", "bottom": "skipped",
    }  # fmt: skip
    assert await told(rows, job_id, len(before)) == [
        ("cancel_requested", "cancel_requested", None, None, None),
        ("cancelled", "cancel_requested", "left", "cancelled", 1),
        ("cancelled", "cancel_requested", "right", "cancelled", 1),
        ("skipped", "cancelled", "bottom", "skipped", 0),
    ]
    assert (await rows.events(job_id))[len(before)]["data"] == REASON
    job = await rows.job(job_id)
    assert await asked_of(rows, job_id) == REASON
    assert job["expires_at"] - job["finished_at"] - timedelta(seconds=KEPT) < timedelta(seconds=30)
    ended = await rows.connection.fetchval(
        "SELECT count(*) FROM task WHERE job_id = $1 AND finished_at BETWEEN $2::timestamptz - interval '30 s'"
        " AND $2::timestamptz + interval '30 s'",
        job_id, job["finished_at"],
    )  # fmt: skip
    assert ended >= 3
    await assert_history(rows, job_id)


async def test_a_step_that_waits_for_its_time_ends_with_the_job(rows: Rows) -> None:
    claimed = await rows.leased()
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 600.0)])
    before = await rows.events(claimed.job_id)
    assert (await cancel(rows, claimed.job_id)).states == {claimed.job_id: "cancelled"}
    assert await rows.statuses(claimed.job_id) == {"only": "cancelled"}
    assert await told(rows, claimed.job_id, len(before)) == [
        ("cancel_requested", "cancel_requested", None, None, None),
        ("cancelled", "cancelled", "only", "cancelled", 1),
    ]
    await assert_history(rows, claimed.job_id)


async def test_a_job_with_a_step_that_runs_waits_for_it_as_long_as_its_grace(rows: Rows) -> None:
    claimed = await rows.leased(THREE, keep_seconds=KEPT)
    before = await rows.events(claimed.job_id)
    cancels = await cancel(rows, claimed.job_id)
    assert (cancels.states, cancels.ended, cancels.hints) == ({claimed.job_id: "cancel_requested"}, [], [])
    assert await rows.statuses(claimed.job_id) == {"a": "running", "b": "skipped", "c": "skipped"}
    assert await told(rows, claimed.job_id, len(before)) == [
        ("cancel_requested", "cancel_requested", None, None, None),
        ("skipped", "cancel_requested", "b", "skipped", 0),
        ("skipped", "cancel_requested", "c", "skipped", 0),
    ]
    job = await rows.job(claimed.job_id)
    assert (job["finished_at"], job["expires_at"], job["leased"]) == (None, None, 1)
    left = await rows.connection.fetchval("SELECT $1::timestamptz - clock_timestamp()", job["cancel_by"])
    assert timedelta() < left <= timedelta(seconds=job["grace_seconds"])
    await assert_history(rows, claimed.job_id)


async def test_a_second_cancel_changes_nothing(rows: Rows) -> None:
    running, waiting = await rows.leased(THREE), await half_done(rows)
    await cancel(rows, running.job_id, waiting)
    before = await state_of(rows, [str(running.job_id), str(waiting)])
    again = await cancel(rows, running.job_id, waiting, forced=True)
    assert (again.states, again.ended, again.hints) == ({}, [], [])
    assert await state_of(rows, [str(running.job_id), str(waiting)]) == before


@pytest.mark.parametrize(
    ("how", "status"), [({}, "running"), ({"forced": False}, "running"), ({"forced": True}, "cancel_requested")]
)
async def test_a_job_that_does_not_support_it_is_cancelled_by_force_only(
    rows: Rows, how: dict[str, bool], status: str
) -> None:
    running = await rows.leased(THREE)
    await rows.connection.execute("UPDATE job SET cancelable = false WHERE id = $1", running.job_id)
    await cancel(rows, running.job_id, **how)
    assert (await rows.job(running.job_id))["status"] == status


async def test_a_job_that_waits_at_a_limit_leaves_the_line(rows: Rows) -> None:
    async with rows.connection.transaction():
        assert await rows.submit(THREE, limits=[ConcurrencyLimit("t", "k", at_most=0)]) == []
    job_id = await rows.connection.fetchval("SELECT id FROM job WHERE held")
    assert (await cancel(rows, job_id)).states == {job_id: "cancelled"}
    assert await rows.statuses(job_id) == {"a": "skipped", "b": "skipped", "c": "skipped"}
    assert not (await rows.job(job_id))["held"]
    await concurrency.admit(rows.connection, [("t", "k")], [job_id])
    await assert_history(rows, job_id)


async def test_a_workflow_that_waits_is_due_with_one_hint_in_its_own_queue(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), wait(2), delay=600.0)
    await rows.connection.execute("UPDATE task SET wake_at = 7, priority = 2 WHERE id = $1", workflow.lease.task_id)
    await rows.connection.execute("UPDATE job SET trace = $2 WHERE id = $1", workflow.job_id, TRACE)
    await rows.connection.execute("DELETE FROM outbox")
    before = await rows.connection.fetchval("SELECT clock_timestamp()")
    cancels = await cancel(rows, workflow.job_id)
    after = await rows.connection.fetchval("SELECT clock_timestamp()")
    assert (cancels.states, cancels.ended) == ({workflow.job_id: "cancel_requested"}, [])
    task = await rows.task(workflow.lease.task_id)
    assert (task["status"], task["wake_at"]) == ("waiting", None)
    (due,) = await rows.connection.fetch("SELECT * FROM outbox")
    assert before + timedelta(seconds=1) <= due["relay_at"] <= after + timedelta(seconds=1)
    assert (due["task_id"], due["job_id"], due["queue"], due["priority"], due["headers"]) == (
        workflow.lease.task_id, workflow.job_id, "default", 2, TRACE,
    )  # fmt: skip
    (hint,) = cancels.hints
    assert (hint.hint.task_id, hint.hint.headers) == (workflow.lease.task_id, TRACE)
    (child,) = [status for name, status in (await rows.statuses(workflow.job_id)).items() if name != "only"]
    assert child == "cancelled"
    await assert_history(rows, workflow.job_id)


@pytest.mark.parametrize("state", ["pending", "retry"])
async def test_a_workflow_that_waits_for_an_attempt_sees_the_cancel(rows: Rows, state: str) -> None:
    workflow = await suspended(rows, wait(1), delay=0.0)
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    if state == "pending":
        await settlements.release(rows.connection, [again.lease])
    else:
        await settlements.fail(rows.connection, [Failure(again.lease, "error", "c", "m", True, 600.0)])
    assert (await rows.task(again.lease.task_id))["status"] == state
    cancels = await cancel(rows, workflow.job_id)
    assert cancels.states == {workflow.job_id: "cancel_requested"}
    (claimed,) = await rows.claim_all()
    assert (claimed.lease.task_id, claimed.cancelling) == (workflow.lease.task_id, True)
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_that_runs_is_not_called_twice(rows: Rows) -> None:
    workflow = await suspended(rows, wait(1), delay=0.0)
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    cancels = await cancel(rows, workflow.job_id)
    assert (cancels.states, cancels.hints) == ({workflow.job_id: "cancel_requested"}, [])
    assert (await rows.job(workflow.job_id))["leased"] == 1
    await settlements.acknowledge_cancel(rows.connection, [again.lease])
    assert (await rows.job(workflow.job_id))["status"] == "cancelled"
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_that_has_ended_is_not_called_again(rows: Rows) -> None:
    """Its job goes on with the step after it."""
    first = await rows.leased(THREE)
    await settlements.suspend(rows.connection, [Suspending(first.lease, (wait(1),), 0, None, 0.0)])
    (again,) = await claims.claim(rows.connection, rows.terms, [first.lease.task_id])
    await settlements.complete(rows.connection, [Completion(again.lease)])
    assert (await cancel(rows, first.job_id)).states == {first.job_id: "cancelled"}
    assert await rows.statuses(first.job_id) == {"a": "succeeded", "b": "cancelled", "c": "skipped"}
    await assert_history(rows, first.job_id)


async def test_a_workflow_that_is_retried_and_waits_at_a_limit_ends_unseen(rows: Rows) -> None:
    async with rows.connection.transaction():
        await rows.submit(limits=[ConcurrencyLimit("t", "k", at_most=0)])
    job_id = await rows.connection.fetchval("SELECT id FROM job WHERE held")
    await rows.connection.execute("UPDATE task SET journaled = true WHERE job_id = $1", job_id)
    assert (await cancel(rows, job_id)).states == {job_id: "cancelled"}
    assert await rows.statuses(job_id) == {"only": "skipped"}
    await assert_history(rows, job_id)


async def test_each_of_many_jobs_ends_by_its_own_steps(rows: Rows) -> None:
    waiting, running = await half_done(rows), await rows.leased(THREE)
    workflow, other = await suspended(rows, step(1), wait(2)), await suspended(rows, wait(1))
    cancels = await cancel(rows, waiting, running.job_id, workflow.job_id, other.job_id)
    assert cancels.states == {
        waiting: "cancelled",
        running.job_id: "cancel_requested",
        workflow.job_id: "cancel_requested",
        other.job_id: "cancel_requested",
    }
    assert sorted(hint.hint.task_id for hint in cancels.hints) == sorted([workflow.lease.task_id, other.lease.task_id])
    assert [(ended.pipeline, ended.outcome) for ended in cancels.ended] == [("diamond", "cancelled")]
    for job_id in cancels.states:
        assert (await rows.events(job_id))[-1]["tenant_id"] == "t"
        await assert_history(rows, job_id)


async def test_no_job_changes_that_was_not_named_or_is_another_tenants_or_has_ended(rows: Rows) -> None:
    async def world(tenant: str) -> list[Claimed]:
        running = await rows.leased(THREE, tenant=tenant)
        workflow = await suspended(rows, step(1), wait(2), delay=600.0)
        await rows.connection.execute("UPDATE job SET tenant_id = $2 WHERE id = $1", workflow.job_id, tenant)
        return [running, workflow]

    unnamed, strange = await world("t"), await world("rival")
    ended = await rows.leased(ONE)
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    named = await rows.leased(THREE)
    others = [str(claimed.job_id) for claimed in [*unnamed, *strange, ended]]
    before = await state_of(rows, others)
    cancels = await cancel(rows, named.job_id, ended.job_id, *(claimed.job_id for claimed in strange))
    assert list(cancels.states) == [named.job_id]
    assert await state_of(rows, others) == before
    assert (await cancel(rows, ended.job_id)).states == {}


async def test_a_step_that_ends_meanwhile_leaves_no_job_that_waits_for_it(rows: Rows, another: Open) -> None:
    """The settlement holds the job; the cancel waits for it, and then counts what still runs."""
    claimed, other = await rows.leased(THREE), await another()
    settling = rows.connection.transaction()
    await settling.start()
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    cancelling = asyncio.create_task(cancel(other, claimed.job_id))
    await until_waiting(rows.connection)
    await settling.commit()
    assert (await cancelling).states == {claimed.job_id: "cancelled"}
    assert await rows.statuses(claimed.job_id) == {"a": "succeeded", "b": "cancelled", "c": "skipped"}
    await assert_history(rows, claimed.job_id)
