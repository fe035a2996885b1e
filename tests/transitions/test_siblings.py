"""What one step of a job does while another step of it ends the job: nothing of the job is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.domain.states import TASK_TERMINAL
from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Part, Snoozing
from tests.factories import DIAMOND, Rows, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

MAX_LOSSES = 1


async def _siblings(rows: Rows) -> tuple[Lease, Lease]:
    """Two steps of one job, both leased."""
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    left, right = await rows.claim_all()
    return left.lease, right.lease


async def _fail(connection: Connection, lease: Lease) -> None:
    await settlements.fail(connection, [Failure(lease, "error", "c", "m", False, 0.0)])


async def _lose(connection: Connection, lease: Lease) -> None:
    await connection.execute("UPDATE task SET losses = 9 WHERE id = $1", lease.task_id)
    await sweeps.expire_leases(connection, [lease.owner], MAX_LOSSES)


async def _cancel(connection: Connection, lease: Lease) -> None:
    job = await connection.fetchval("SELECT job_id FROM task WHERE id = $1", lease.task_id)
    await jobs.request_cancel(connection, [job], "t", reason="r", by="b")
    await settlements.acknowledge_cancel(connection, [lease])


@pytest.mark.parametrize("end", [_fail, _cancel])
async def test_the_parts_of_a_step_that_spreads_while_its_sibling_ends_the_job_end_with_it(
    rows: Rows, another: Open, end: Callable[[Connection, Lease], Coroutine[Any, Any, None]]
) -> None:
    left, right = await _siblings(rows)
    other = (await another()).connection
    spreading = other.transaction()
    await spreading.start()
    await settlements.fan_out(other, [FanningOut(left, [Part("part", "default", 1, "one.only", 1)])])
    ending = asyncio.create_task(end(rows.connection, right))
    await until_waiting(other)
    await spreading.commit()
    await ending
    await _assert_all_ended(rows, left)


async def test_steps_that_are_lost_together_end_together_when_one_was_lost_too_often(rows: Rows) -> None:
    left, right = await _siblings(rows)
    await _lose(rows.connection, right)
    await _assert_all_ended(rows, left)
    assert not await rows.connection.fetchval("SELECT count(*) FROM task WHERE id = $1 AND losses = 0", left.task_id)


async def test_the_error_of_a_job_is_that_of_the_step_that_ended_it(rows: Rows) -> None:
    """Its sibling failed in the same batch, and could have run again."""
    left, right = await _siblings(rows)
    failures = [
        Failure(left, "error", "might_pass", "m", True, 0.0),
        Failure(right, "error", "cannot_pass", "m", False, 0.0),
    ]
    outcome = await settlements.fail(rows.connection, failures)
    job = await rows.job((await rows.task(left.task_id))["job_id"])
    assert (job["error"]["code"], job["error"]["step"], job["error"]["retryable"]) == ("cannot_pass", "right", False)
    assert [ended.outcome for ended in outcome.ended] == ["rejected"]
    await _assert_all_ended(rows, left)


async def test_the_error_of_a_job_names_the_step_that_was_lost_too_often(rows: Rows) -> None:
    left, right = await _siblings(rows)
    await _lose(rows.connection, right)
    assert (await rows.job((await rows.task(left.task_id))["job_id"]))["error"]["step"] == "right"


@pytest.mark.parametrize("state", ["pending", "retry", "waiting"])
async def test_a_step_that_waits_ends_with_the_job_that_its_sibling_fails(rows: Rows, state: str) -> None:
    left, right = await _siblings(rows)
    if state == "pending":
        await settlements.release(rows.connection, [right])
    elif state == "retry":
        await settlements.fail(rows.connection, [Failure(right, "error", "c", "m", True, 0.0)])
    else:
        await settlements.snooze(rows.connection, [Snoozing(right, 0.0)])
    assert (await rows.task(right.task_id))["status"] == state
    await _fail(rows.connection, left)
    assert (await rows.task(right.task_id))["status"] == "skipped"
    await _assert_all_ended(rows, right)


async def test_a_cancel_ends_only_the_step_whose_worker_is_lost_before_the_grace_has_passed(rows: Rows) -> None:
    left, right = await _siblings(rows)
    job_id = (await rows.task(left.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")
    await rows.lapse(left.task_id)
    assert (await sweeps.expire_leases(rows.connection, [], 5))[0] == 0  # the step would run again
    assert await sweeps.end_cancels(rows.connection, [], 5) == []
    assert await rows.statuses(job_id) == {
        "top": "succeeded", "left": "cancelled", "right": "running", "bottom": "skipped",
    }  # fmt: skip
    assert (await rows.events(job_id))[-1]["data"] == {"forced": True, "because": "the worker was lost"}
    ended = (await settlements.acknowledge_cancel(rows.connection, [right])).ended
    assert [one.outcome for one in ended] == ["cancelled"]
    await _assert_all_ended(rows, right)


async def test_a_cancel_whose_grace_has_passed_leaves_the_steps_that_have_ended_as_they_are(rows: Rows) -> None:
    left, _ = await _siblings(rows)
    job_id = (await rows.task(left.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")
    await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp()")
    assert [one.outcome for one in await sweeps.end_cancels(rows.connection, [], 5)] == ["cancelled"]
    assert await rows.statuses(job_id) == {
        "top": "succeeded", "left": "cancelled", "right": "cancelled", "bottom": "skipped",
    }  # fmt: skip
    await _assert_all_ended(rows, left)


async def test_of_two_steps_that_stop_for_a_cancel_only_the_second_one_ends_the_job(rows: Rows) -> None:
    left, right = await _siblings(rows)
    job_id = (await rows.task(left.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")
    for lease, outcomes in ((left, []), (right, ["cancelled"])):
        settled = await settlements.acknowledge_cancel(rows.connection, [lease])
        assert [one.outcome for one in settled.ended] == outcomes
    await _assert_all_ended(rows, left)


async def _assert_all_ended(rows: Rows, lease: Lease) -> None:
    job_id = (await rows.task(lease.task_id))["job_id"]
    assert (await rows.job(job_id))["finished_at"] is not None
    assert set((await rows.statuses(job_id)).values()) <= TASK_TERMINAL
    assert await claims.claim(rows.connection, rows.terms, [lease.task_id]) == []
    await assert_history(rows, job_id)
