"""What a failed attempt does to its job and to the workflow that started it, and what the history says of it."""

from __future__ import annotations

import pytest

from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Suspending
from leasehold.transitions.workflows import reading
from tests.factories import DIAMOND, ONE, Rows, assert_histories, assert_history
from tests.transitions.test_workflows import children, is_due, step, suspended


def failure(claimed: Claimed, *, retryable: bool = False, delay: float = 0.0) -> Failure:
    return Failure(claimed.lease, "error", "bad", "no", retryable, delay)


async def middle(rows: Rows, **columns: int) -> list[Claimed]:
    """The leased steps `left` and `right` of a job."""
    top = await rows.leased(DIAMOND, **columns)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    return sorted(await rows.claim_all(), key=lambda claimed: claimed.step)


async def test_a_job_has_failed_with_its_last_event_and_not_before(rows: Rows) -> None:
    left, _ = await middle(rows, keep_seconds=3600)
    before = len(await rows.events(left.job_id))
    settled = await settlements.fail(rows.connection, [failure(left)])
    assert [ended.outcome for ended in settled.ended] == ["rejected"]
    told = [(e["kind"], e["step"], e["task_status"], e["job_status"]) for e in await rows.events(left.job_id)][before:]
    assert told == [
        ("failed", "left", "failed", "running"),
        ("cancelled", "right", "cancelled", "running"),
        ("skipped", "bottom", "skipped", "failed"),
    ]
    await assert_history(rows, left.job_id)


async def test_steps_that_fail_together_end_their_job_once(rows: Rows) -> None:
    """The job's error is that of the step that may not run again."""
    left, right = await middle(rows)
    before = len(await rows.events(left.job_id))
    failures = [failure(left, retryable=True), Failure(right.lease, "error", "worse", "no", False, 0.0)]
    settled = await settlements.fail(rows.connection, failures)
    assert len(settled.ended) == 1
    told = [(e["step"], e["task_status"], e["job_status"]) for e in await rows.events(left.job_id)][before:]
    assert told == [("left", "failed", "running"), ("right", "failed", "running"), ("bottom", "skipped", "failed")]
    assert (await rows.job(left.job_id))["error"]["code"] == "worse"
    await assert_history(rows, left.job_id)


async def test_a_job_whose_step_runs_again_goes_on_without_an_error(rows: Rows) -> None:
    claimed = await rows.leased(ONE, keep_seconds=3600)
    await settlements.fail(rows.connection, [failure(claimed, retryable=True, delay=60.0)])
    job = await rows.job(claimed.job_id)
    assert (job["status"], job["error"], job["finished_at"], job["expires_at"]) == ("running", None, None, None)
    retried = (await rows.events(claimed.job_id))[-1]
    assert (retried["kind"], retried["job_status"]) == ("retried", "running")
    assert retried["data"]["retry_at"] is not None
    await assert_history(rows, claimed.job_id)


async def test_a_dead_letter_is_a_step_that_failed_for_good_and_that_no_workflow_started(rows: Rows) -> None:
    """A step that runs again is none, nor is one that a sweep has failed before: the sweep has counted it."""
    await suspended(rows, step(1), ends=1)
    (child,) = await children(rows)
    retried, lost, failed = [await rows.leased() for _ in range(3)]
    await rows.lapse(lost.lease.task_id)
    assert (await sweeps.expire_leases(rows.connection, [], 0))[0] == 1
    failures = [failure(child), failure(retried, retryable=True), failure(lost), failure(failed)]
    settled = await settlements.fail(rows.connection, failures)
    assert settled.dead_letters == {failed.lease.task_id}


async def test_only_an_attempt_that_is_followed_by_another_says_when(rows: Rows) -> None:
    claimed = await rows.leased()
    await settlements.fail(rows.connection, [failure(claimed)])
    last = (await rows.events(claimed.job_id))[-1]
    assert (last["kind"], last["data"]["retry_at"]) == ("failed", None)


async def test_a_workflow_is_woken_by_as_many_failures_as_it_waits_for_and_no_other_workflow_is(rows: Rows) -> None:
    """An attempt that is followed by another is no end."""
    workflow = await suspended(rows, step(1, attempts=2), step(2), step(3), ends=2)
    first, second, third = await children(rows)
    twin = await suspended(rows, step(1), ends=1)
    before = await rows.task(twin.lease.task_id)
    settled = await settlements.fail(rows.connection, [failure(first, retryable=True)])
    assert (settled.announcements, await is_due(rows, workflow)) == ([], False)
    await assert_history(rows, workflow.job_id)
    (first,) = [child for child in await children(rows) if child.lease.task_id == first.lease.task_id]
    settled = await settlements.fail(rows.connection, [failure(first)])
    assert (settled.announcements, await is_due(rows, workflow)) == ([], False)
    settled = await settlements.fail(rows.connection, [failure(second)])
    assert [hint.hint.task_id for hint in settled.announcements] == [workflow.lease.task_id]
    assert await is_due(rows, workflow)
    settled = await settlements.fail(rows.connection, [failure(third)])
    assert settled.announcements == []
    assert await rows.task(twin.lease.task_id) == before
    await assert_histories(rows.connection)


async def test_a_failure_while_the_workflow_runs_is_read_at_its_next_suspension(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), step(2), ends=1)
    first, second = await children(rows)
    await settlements.fail(rows.connection, [failure(first)])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    seen = (await reading.read(rows.connection, again.lease)).news
    before = (await rows.task(again.lease.task_id))["available_at"]
    settled = await settlements.fail(rows.connection, [failure(second)])
    assert settled.announcements == []
    assert (await rows.task(again.lease.task_id))["available_at"] == before
    settled = await settlements.suspend(rows.connection, [Suspending(again.lease, (), seen, 1)])
    assert [hint.hint.task_id for hint in settled.announcements] == [workflow.lease.task_id]
    await assert_history(rows, workflow.job_id)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_workflow_and_its_step_that_fail_together_are_each_counted_once(rows: Rows, ends: bool) -> None:
    workflow = await suspended(rows, step(1), step(2), ends=1)
    first, second = await children(rows)
    await settlements.complete(rows.connection, [Completion(first.lease)])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    settled = await settlements.fail(rows.connection, [failure(second), failure(again, retryable=not ends)])
    assert settled.announcements == []
    assert await rows.statuses(workflow.job_id) == {
        "only": "failed" if ends else "retry", "child#1": "succeeded", "child#2": "failed",
    }  # fmt: skip
    await assert_history(rows, workflow.job_id)


async def test_no_workflow_is_woken_of_a_job_that_ends_at_that_moment(rows: Rows) -> None:
    left, right = await middle(rows)
    await settlements.suspend(rows.connection, [Suspending(left.lease, (step(1),), 0, 1)])
    (child,) = await children(rows)
    settled = await settlements.fail(rows.connection, [failure(child), failure(right)])
    assert settled.announcements == []
    assert (await rows.task(left.lease.task_id))["status"] == "skipped"
    assert (await rows.job(left.job_id))["status"] == "failed"
    await assert_history(rows, left.job_id)


@pytest.mark.parametrize("together", [False, True])
async def test_a_cancelled_job_has_ended_with_the_last_of_its_steps_that_stops(rows: Rows, together: bool) -> None:
    left, right = await middle(rows, keep_seconds=3600)
    await jobs.request_cancel(rows.connection, [left.job_id], "t", reason="r", by="b")
    before = len(await rows.events(left.job_id))
    for leases in [[left.lease, right.lease]] if together else [[left.lease], [right.lease]]:
        assert (await rows.job(left.job_id))["expires_at"] is None
        await settlements.acknowledge_cancel(rows.connection, leases)
    told = [(e["kind"], e["step"], e["job_status"]) for e in await rows.events(left.job_id)][before:]
    assert told == [("cancelled", "left", "cancel_requested"), ("cancelled", "right", "cancelled")]
    assert (await rows.job(left.job_id))["expires_at"] is not None
    await assert_history(rows, left.job_id)
