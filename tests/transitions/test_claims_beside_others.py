"""What a claim says about each task, and how it fits in beside the other steps of the same job."""

from __future__ import annotations

import asyncio
from typing import Any

from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.settlements import Completion, FanningOut, Part
from tests.factories import DIAMOND, Rows, assert_history, terms
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_claimable import set_task
from tests.transitions.test_workflows import children, step, suspended, wait


async def test_a_claim_waits_until_a_step_beside_it_has_been_settled(rows: Rows, another: Open) -> None:
    """Both number their events in the history of their job."""
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    left, right = await rows.claim_all()
    await settlements.release(rows.connection, [right.lease])
    other = await another()
    async with other.connection.transaction():
        await settlements.complete(other.connection, [Completion(left.lease)])
        claiming = asyncio.create_task(claims.claim(rows.connection, rows.terms, [right.lease.task_id]))
        await until_waiting(other.connection)
    (again,) = await claiming
    assert again.lease.epoch == 2
    await assert_history(rows, top.job_id)


async def test_a_claim_says_how_much_grace_is_left(rows: Rows) -> None:
    """All of it, until somebody cancels the job. None, once it has passed and no sweep has ended the job yet."""
    claimed = await rows.leased()
    assert claimed.grace_seconds == (await rows.job(claimed.job_id))["grace_seconds"] > 0
    workflow = await suspended(rows, wait(1))
    await jobs.request_cancel(rows.connection, [workflow.job_id], "t", reason="r", by="b")
    await rows.connection.execute("UPDATE job SET cancel_by = now() - interval '1 hour' WHERE cancel_by IS NOT NULL")
    (late,) = await rows.claim_all()
    assert (late.lease.task_id, late.cancelling, late.grace_seconds) == (workflow.lease.task_id, True, 0)


async def test_steps_that_are_claimed_together_have_each_their_own_argument_and_place_for_outputs(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), step(2))
    assert [(child.params, child.output_prefix) for child in await children(rows)] == [
        ({"n": number}, f"{workflow.output_prefix}/child.{number}") for number in (1, 2)
    ]
    spread = await rows.leased()
    parts = [Part("only", "default", 1, "one.only", number) for number in range(2)]
    await settlements.fan_out(rows.connection, [FanningOut(spread.lease, parts)])
    assert {part.step: part.output_prefix for part in await rows.claim_all()} == {
        f"only.{number}": f"{spread.output_prefix}/only.{number}" for number in range(2)
    }


async def test_the_history_tells_a_takeover_from_a_claim_and_a_job_of_external_steps_waits_for_its_worker(
    rows: Rows,
) -> None:
    lost = await rows.leased()
    await rows.lapse(lost.lease.task_id)
    await claims.claim(rows.connection, terms(), [lost.lease.task_id])
    kinds = [event["kind"] for event in await rows.events(lost.job_id)]
    assert kinds[-2:] == ["claimed", "taken_over"]
    (hint,) = await rows.submit()
    await set_task(rows, hint.hint.task_id, queue="ext:reports")
    (external,) = await claims.claim(rows.connection, rows.terms, [hint.hint.task_id])
    statuses = [(await rows.job(claimed.job_id))["status"] for claimed in (lost, external)]
    assert statuses == ["running", "waiting_worker"]


async def test_a_claim_that_waits_while_the_task_ends_takes_nothing(rows: Rows, another: Open) -> None:
    """Between the look of the claim and its lock of the job another worker may have claimed and settled the task."""
    other: Any = await another()
    for ending in ("succeeded", "skipped"):
        (hint,) = await rows.submit()
        task_id = hint.hint.task_id
        for claim in (rows.claim_all, lambda one=task_id: claims.claim(rows.connection, rows.terms, [one])):
            await set_task(rows, task_id, status="pending", finished_at=None)
            async with other.connection.transaction():
                now = await other.connection.fetchval("SELECT now()")
                await set_task(other, task_id, status=ending, finished_at=now)
                claiming = asyncio.ensure_future(claim())
                await until_waiting(other.connection)
            assert await claiming == []
            assert (await rows.task(task_id))["epoch"] == 0
