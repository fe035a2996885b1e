"""A cancel of a job whose workflow has called something: who claims, ends and returns the workflow."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID, uuid4

import pytest

from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Snoozing, Suspending, Verdict
from leasehold.transitions.workflows import children, reading, recording
from leasehold.transitions.workflows.records import Call, Recorded, Recording
from tests.factories import ONE, Rows, assert_history
from tests.transitions.test_workflows import step, suspended, wait


async def cancel(rows: Rows, job: UUID) -> jobs.Cancels:
    return await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")


async def cancelled(rows: Rows, *calls: Call) -> Claimed:
    """A workflow that waits, in a job that is being cancelled."""
    workflow = await suspended(rows, *calls)
    await cancel(rows, workflow.job_id)
    return workflow


async def status(rows: Rows, workflow: Claimed) -> tuple[str, str]:
    job = await rows.job(workflow.job_id)
    return job["status"], (await rows.task(workflow.lease.task_id))["status"]


async def test_the_cancel_makes_the_workflow_due_with_a_hint_and_ends_its_steps(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), wait(2))
    cancels = await cancel(rows, workflow.job_id)
    assert cancels.states == {workflow.job_id: "cancel_requested"}
    assert [hint.hint.task_id for hint in cancels.hints] == [workflow.lease.task_id]
    (claimed,) = await rows.claim_all()
    assert (claimed.lease.task_id, claimed.cancelling, claimed.previous_state) == (
        workflow.lease.task_id,
        True,
        "waiting",
    )
    assert 0 < claimed.grace_seconds <= 30
    await settlements.acknowledge_cancel(rows.connection, [claimed.lease])
    assert await status(rows, workflow) == ("cancelled", "cancelled")
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_that_has_recorded_a_call_sees_the_cancel_although_it_waits_for_its_next_attempt(
    rows: Rows,
) -> None:
    """It has something to undo, also if nothing has failed before the call."""
    workflow = await rows.leased()
    call = Call("", 1, "call", "do", "done", {"value": 1})
    await recording.record(rows.connection, [Recording(workflow.lease, (call,))])
    await settlements.fail(rows.connection, [settlements.Failure(workflow.lease, "error", "e", "m", True, 60.0)])
    cancels = await cancel(rows, workflow.job_id)
    assert (cancels.states, len(cancels.hints)) == ({workflow.job_id: "cancel_requested"}, 1)
    (claimed,) = await rows.claim_all()
    assert (claimed.lease.task_id, claimed.cancelling) == (workflow.lease.task_id, True)
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_reads_in_its_journal_when_the_cancel_was_requested(rows: Rows) -> None:
    workflow = await rows.leased()
    assert (await reading.read(rows.connection, workflow.lease)).cancelled_at is None
    await cancel(rows, workflow.job_id)
    requested = (await rows.job(workflow.job_id))["cancel"]["at"]
    journal = await reading.read(rows.connection, workflow.lease)
    assert journal.cancelled_at == datetime.fromisoformat(requested)


async def test_a_hint_claims_it_too(rows: Rows) -> None:
    workflow = await cancelled(rows, wait(1))
    (claimed,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    assert claimed.cancelling
    assert await status(rows, workflow) == ("cancel_requested", "running")
    await assert_history(rows, workflow.job_id)


async def test_a_worker_that_stops_or_lacks_the_code_leaves_the_cancel_to_another(rows: Rows) -> None:
    """The job does not end before its workflow has seen the cancel."""
    workflow = await cancelled(rows, wait(1))
    (claimed,) = await rows.claim_all()
    await settlements.release(rows.connection, [claimed.lease])
    assert await status(rows, workflow) == ("cancel_requested", "pending")
    await assert_history(rows, workflow.job_id)
    (claimed,) = await rows.claim_all()
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 0.0)])
    assert await status(rows, workflow) == ("cancel_requested", "waiting")
    await assert_history(rows, workflow.job_id)
    (claimed,) = await rows.claim_all()
    await settlements.acknowledge_cancel(rows.connection, [claimed.lease])
    assert await status(rows, workflow) == ("cancelled", "cancelled")
    await assert_history(rows, workflow.job_id)


async def test_a_step_that_runs_still_ends_and_the_workflow_is_not_forgotten(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await rows.claim_all()
    await cancel(rows, workflow.job_id)
    outcome = await settlements.complete(rows.connection, [Completion(child.lease, claim_next=True)], rows.terms)
    assert (outcome.next_steps, outcome.ended) == ({}, [])
    assert await status(rows, workflow) == ("cancel_requested", "waiting")
    (claimed,) = await rows.claim_all()
    assert claimed.lease.task_id == workflow.lease.task_id
    await settlements.acknowledge_cancel(rows.connection, [claimed.lease])
    assert await status(rows, workflow) == ("cancelled", "cancelled")
    await assert_history(rows, workflow.job_id)


async def test_no_other_step_of_a_cancelled_job_is_claimed_again(rows: Rows) -> None:
    """Neither by its hint after its worker has died, nor by the worker whose claim's answer was lost."""
    workflow = await suspended(rows, step(1))
    (child,) = await rows.claim_all()
    await cancel(rows, workflow.job_id)
    await rows.connection.execute("UPDATE task SET lease_until = clock_timestamp() WHERE status = 'running'")
    taken = await claims.claim(rows.connection, rows.terms, [child.lease.task_id], [child.lease.owner], reclaim=True)
    assert taken == []


@pytest.mark.parametrize("by_hint", [True, False])
async def test_only_the_workflow_is_due_in_a_job_that_is_being_cancelled(rows: Rows, by_hint: bool) -> None:
    workflow = await cancelled(rows, wait(1))
    await rows.connection.execute("UPDATE task SET journaled = false")
    task = workflow.lease.task_id
    assert await (claims.claim(rows.connection, rows.terms, [task]) if by_hint else rows.claim_all()) == []


async def test_the_answer_of_the_claim_may_be_lost(rows: Rows) -> None:
    workflow = await cancelled(rows, wait(1))
    (claimed,) = await rows.claim_all()
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id], reclaim=True)
    assert (again.lease.epoch, again.cancelling) == (claimed.lease.epoch + 1, True)
    await assert_history(rows, workflow.job_id)


@pytest.mark.parametrize(("losses", "overdue", "goes_on"), [(4, False, True), (5, False, False), (0, True, False)])
async def test_a_workflow_that_is_lost_too_often_or_too_late_does_not_see_the_cancel(
    rows: Rows, losses: int, overdue: bool, goes_on: bool
) -> None:
    workflow = await cancelled(rows, wait(1))
    (claimed,) = await rows.claim_all()
    await rows.connection.execute("UPDATE task SET losses = $1", losses)
    if overdue:
        await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp()")
    ended = await sweeps.end_cancels(rows.connection, [claimed.lease.owner], 5)
    assert [one.outcome for one in ended] == ([] if goes_on else ["cancelled"])
    assert await status(rows, workflow) == (("cancel_requested", "pending") if goes_on else ("cancelled", "cancelled"))
    assert (await rows.task(workflow.lease.task_id))["losses"] == losses + goes_on
    if not goes_on:
        because = "the grace passed" if overdue else "the worker was lost"
        assert (await rows.events(workflow.job_id))[-1]["data"] == {"forced": True, "because": because}
    await assert_history(rows, workflow.job_id)


async def test_a_lost_step_does_not_take_its_waiting_workflow_with_it_before_the_grace_has_passed(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), ends=1)
    (child,) = await rows.claim_all()
    await cancel(rows, workflow.job_id)
    await rows.lapse(child.lease.task_id)
    assert await sweeps.end_cancels(rows.connection, [], 5) == []
    assert await status(rows, workflow) == ("cancel_requested", "waiting")
    assert (await rows.task(child.lease.task_id))["status"] == "cancelled"
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_whose_worker_is_lost_goes_on_within_the_grace(rows: Rows) -> None:
    workflow = await cancelled(rows, step(1), wait(2))
    (claimed,) = await rows.claim_all()
    assert await sweeps.end_cancels(rows.connection, [claimed.lease.owner], 5) == []
    assert await status(rows, workflow) == ("cancel_requested", "pending")
    assert (await rows.task(workflow.lease.task_id))["losses"] == 1
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox WHERE task_id = $1", workflow.lease.task_id) > 0
    await assert_history(rows, workflow.job_id)
    (again,) = await rows.claim_all()
    await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp()")
    (ended,) = await sweeps.end_cancels(rows.connection, [], 5)
    assert ended.outcome == "cancelled"
    assert (again.cancelling, await status(rows, workflow)) == (True, ("cancelled", "cancelled"))
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_whose_lease_passes_while_a_sweep_is_under_way_is_left_to_the_next_sweep(rows: Rows) -> None:
    """The sweep returns workflows by one statement, and ends other steps by the next: the lease may pass in between."""
    workflow = await cancelled(rows, step(1), wait(2))
    await rows.claim_all()
    await rows.lapse(workflow.lease.task_id)
    assert await rows.connection.fetch(sweeps.END_CANCELS, [], [workflow.job_id], 5) == []
    assert await status(rows, workflow) == ("cancel_requested", "running")
    assert await sweeps.end_cancels(rows.connection, [], 5) == []
    assert await status(rows, workflow) == ("cancel_requested", "pending")
    await assert_history(rows, workflow.job_id)


async def test_a_workflow_that_loses_its_workers_too_often_ends(rows: Rows) -> None:
    workflow = await cancelled(rows, wait(1))
    (claimed,) = await rows.claim_all()
    await rows.connection.execute("UPDATE task SET losses = 2 WHERE id = $1", workflow.lease.task_id)
    (ended,) = await sweeps.end_cancels(rows.connection, [claimed.lease.owner], 2)
    assert ended.outcome == "cancelled"


async def test_a_workflow_that_must_not_be_interrupted_ends_after_the_grace_once_its_worker_is_lost(
    rows: Rows,
) -> None:
    workflow = await cancelled(rows, wait(1))
    await rows.claim_all()
    await rows.connection.execute("UPDATE task SET cancelable = false")
    await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp()")
    assert await sweeps.end_cancels(rows.connection, [], 5) == []
    assert await status(rows, workflow) == ("cancel_requested", "running")
    await rows.lapse(workflow.lease.task_id)
    (ended,) = await sweeps.end_cancels(rows.connection, [], 5)
    assert ended.outcome == "cancelled"
    assert await status(rows, workflow) == ("cancelled", "cancelled")
    await assert_history(rows, workflow.job_id)


@pytest.mark.parametrize("before", ["waits", "runs"])
async def test_after_the_grace_it_ends_whether_a_worker_has_it_or_not(rows: Rows, before: str) -> None:
    workflow = await cancelled(rows, step(1), wait(2))
    if before == "runs":
        await rows.claim_all()
    assert await sweeps.end_cancels(rows.connection, [], 5) == []
    await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp()")
    (ended,) = await sweeps.end_cancels(rows.connection, [], 5)
    assert ended.outcome == "cancelled"
    assert await status(rows, workflow) == ("cancelled", "cancelled")
    await assert_history(rows, workflow.job_id)


async def test_a_step_beside_the_workflow_ends_with_the_cancel_although_it_has_run(rows: Rows) -> None:
    """Only the workflow itself has a journal."""
    workflow = await suspended(rows, step(1, attempts=3), wait(2))
    (child,) = await rows.claim_all()
    failure = settlements.Failure(child.lease, "error", "e", "m", retryable=True, delay=60.0)
    await settlements.fail(rows.connection, [failure])
    await cancel(rows, workflow.job_id)
    assert (await rows.task(child.lease.task_id))["status"] == "cancelled"
    await assert_history(rows, workflow.job_id)


async def test_only_a_workflow_that_has_seen_the_cancel_records(rows: Rows) -> None:
    workflow = await cancelled(rows, wait(1))
    (claimed,) = await rows.claim_all()
    lease = claimed.lease
    mark, call = Call("", 1, "signal", "go", "cancelled"), Call("", 2, "call", "undo", "done", {"value": 1})
    answers, _ = await recording.record(rows.connection, [Recording(lease, (call,))])
    assert answers == {lease.task_id: Recorded(committed=False, cancelling=True)}
    answers, _ = await recording.record(rows.connection, [Recording(lease, (mark, call), has_seen_cancel=True)])
    assert answers == {lease.task_id: Recorded(committed=True, cancelling=True)}
    states = await rows.connection.fetch("SELECT state FROM journal WHERE job_id = $1 ORDER BY number", workflow.job_id)
    assert [row["state"] for row in states] == ["cancelled", "done"]


async def test_a_zombie_that_saw_the_cancel_records_nothing(rows: Rows) -> None:
    workflow = await cancelled(rows, wait(1))
    (old,) = await rows.claim_all()
    await sweeps.end_cancels(rows.connection, [old.lease.owner], 5)
    await rows.claim_all()
    call = Call("", 2, "call", "undo", "done", {"value": 1})
    answers, _ = await recording.record(rows.connection, [Recording(old.lease, (call,), has_seen_cancel=True)])
    assert not answers[old.lease.task_id].committed
    assert await rows.connection.fetchval("SELECT count(*) FROM journal WHERE job_id = $1", workflow.job_id) == 1


async def test_a_suspension_whose_answer_was_lost_is_settled_although_a_cancel_came(rows: Rows) -> None:
    workflow = await suspended(rows, wait(1))
    await cancel(rows, workflow.job_id)
    outcome = await settlements.suspend(rows.connection, [Suspending(workflow.lease, (wait(1),), 0)])
    assert outcome.verdicts == {workflow.lease.task_id: Verdict.SETTLED}


async def test_a_bulk_cancel_tells_the_workflow_from_the_others(rows: Rows) -> None:
    workflow = await suspended(rows, wait(1))
    (plain,) = await rows.submit(ONE)
    unclaimed = (await rows.task(plain.hint.task_id))["job_id"]
    cancels = await jobs.request_cancel(rows.connection, [workflow.job_id, unclaimed, uuid4()], "t", reason="r", by="b")
    assert cancels.states == {workflow.job_id: "cancel_requested", unclaimed: "cancelled"}
    assert len(cancels.hints) == len(cancels.ended) == 1
    assert await children.cancel_orphans(rows.connection) == ([], [], False)
