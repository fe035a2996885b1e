"""Operators pause and resume a queue: no other queue notices, and the workers of this one hear of all that is due."""

from __future__ import annotations

import pytest

from leasehold.domain.pipeline import Pipeline, Step
from leasehold.domain.states import TaskState
from leasehold.transitions import queues
from tests.factories import Rows
from tests.transitions.test_matrix import put_into

ELSEWHERE = Pipeline("elsewhere", module="tests.factories", steps=[Step("only", queue="elsewhere")])
EXTERNAL = Pipeline("external", module="tests.factories", steps=[Step("only", queue="reports", external=True)])


async def paused(rows: Rows) -> dict[str, str]:
    return {row["queue"]: row["reason"] for row in await rows.connection.fetch("SELECT * FROM paused_queue")}


async def test_a_queue_that_is_paused_again_says_the_last_reason_and_no_other_does(rows: Rows) -> None:
    for queue, reason in (("default", "the disk"), ("elsewhere", "a move"), ("default", "the network")):
        await queues.pause(rows.connection, queue, reason)
    assert await paused(rows) == {"default": "the network", "elsewhere": "a move"}


async def test_a_queue_is_resumed_alone(rows: Rows) -> None:
    for queue in ("default", "elsewhere"):
        await queues.pause(rows.connection, queue, "r")
    await queues.resume(rows.connection, "default")
    assert await paused(rows) == {"elsewhere": "r"}


@pytest.mark.parametrize("is_paused", [True, False])
async def test_workers_are_told_again_of_what_is_due_in_the_resumed_queue(rows: Rows, *, is_paused: bool) -> None:
    """Not of what waits for its time, runs, waits for another step or has ended, nor of another queue. If nobody has
    paused the queue, its workers have heard of everything.
    """
    due = []
    for state in TaskState:
        for seconds in (0, 3600):
            task_id = (await put_into(rows, state))[1].task_id
            await rows.connection.execute(
                "UPDATE task SET available_at = clock_timestamp() + make_interval(secs => $2) WHERE id = $1",
                task_id,
                seconds,
            )
            if seconds == 0 and state in (TaskState.PENDING, TaskState.RETRY, TaskState.WAITING):
                due.append(task_id)
    await rows.submit(ELSEWHERE)
    await rows.connection.execute("DELETE FROM outbox")
    if is_paused:
        await queues.pause(rows.connection, "default", "r")
    told = await queues.resume(rows.connection, "default")
    written = await rows.connection.fetch("SELECT id, task_id, queue FROM outbox")
    assert sorted(one.hint.task_id for one in told) == (sorted(due) if is_paused else [])
    assert {(one.outbox_id, one.hint.task_id, one.hint.queue) for one in told} == {tuple(row) for row in written}


async def test_nobody_is_told_of_the_tasks_of_external_workers(rows: Rows) -> None:
    """These workers ask for tasks: no message would reach them."""
    await rows.submit(EXTERNAL)
    queue = await rows.connection.fetchval("SELECT queue FROM task")
    assert queue.startswith("ext:")
    await queues.pause(rows.connection, queue, "r")
    assert await queues.resume(rows.connection, queue) == []
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 0
