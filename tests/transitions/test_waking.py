"""What wakes a task that waits, wakes this task alone: a callback the step that snoozes, a worker that has the code the
tasks that no worker knew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.domain.missing_code import joined_handlers
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.transitions import claims, settlements, unknown_tasks, wakes, workers
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Snoozing
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_limits_beside_others import wait_for_no_lock

TWO = Pipeline("two", module="tests.factories", steps=[Step("only"), Step("other")])
#: The hour for which a step snoozes.
HOUR = 3600.0


async def written(rows: Rows) -> dict[UUID, str]:
    """By task: its row, and the transaction that wrote it."""
    found = await rows.connection.fetch("SELECT t.id, t.xmin::text || to_jsonb(t)::text AS row FROM task t")
    return {row["id"]: row["row"] for row in found}


async def changed(rows: Rows, before: dict[UUID, str]) -> set[UUID]:
    return {one for one, row in (await written(rows)).items() if row != before[one]}


# --- an outside event


async def claimed_steps(rows: Rows, pipeline: Pipeline = ONE, **columns: Any) -> Sequence[Claimed]:
    hints = await rows.submit(pipeline, **columns)
    return await claims.claim(rows.connection, rows.terms, [hint.hint.task_id for hint in hints])


async def test_an_event_for_a_step_that_snoozes_wakes_this_step_of_this_job_alone(rows: Rows) -> None:
    """Its other step snoozes, too, and so does the same step of another job."""
    own, beside = sorted(await claimed_steps(rows, TWO), key=lambda claimed: claimed.step != "only")
    (another,) = await claimed_steps(rows)
    await settlements.snooze(rows.connection, [Snoozing(one.lease, HOUR) for one in (own, beside, another)])
    before = await written(rows)
    assert list(await wakes.wake(rows.connection, own.job_id, "u", "only")) == []
    assert await changed(rows, before) == set()
    (hint,) = await wakes.wake(rows.connection, own.job_id, "t", "only")
    assert (hint.hint.task_id, await changed(rows, before)) == (own.lease.task_id, {own.lease.task_id})
    told = await rows.connection.fetch("SELECT id, task_id, job_id FROM outbox WHERE task_id = $1", own.lease.task_id)
    assert [tuple(row) for row in told] == [(hint.outbox_id, own.lease.task_id, own.job_id)]
    (woken,) = await rows.claim_all()
    assert woken.lease.task_id == own.lease.task_id


async def test_an_event_wakes_no_step_that_has_not_run_has_failed_runs_or_is_done_outside(rows: Rows) -> None:
    """The first waits for its start time, the next one for its next attempt."""
    runs, ended, failed, outside, not_begun = [(await claimed_steps(rows))[0] for _ in range(5)]
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    await settlements.fail(rows.connection, [Failure(failed.lease, "error", "bad", "", True, HOUR)])
    await settlements.snooze(rows.connection, [Snoozing(outside.lease, HOUR), Snoozing(not_begun.lease, HOUR)])
    await rows.connection.execute("UPDATE task SET queue = 'ext:q' WHERE id = $1", outside.lease.task_id)
    await rows.connection.execute("UPDATE task SET epoch = 0 WHERE id = $1", not_begun.lease.task_id)
    before = await written(rows)
    for one in (runs, ended, failed, outside, not_begun):
        assert list(await wakes.wake(rows.connection, one.job_id, "t", "only")) == []
    assert await changed(rows, before) == set()


# --- a worker that has the code


async def unknown(rows: Rows, count: int) -> list[UUID]:
    """Tasks that a worker without their code has snoozed."""
    claimed = [(await claimed_steps(rows))[0] for _ in range(count)]
    await settlements.snooze(
        rows.connection, [Snoozing(one.lease, HOUR, missing_handler="one.only") for one in claimed]
    )
    return [one.lease.task_id for one in claimed]


async def left(rows: Rows) -> set[UUID]:
    return {row["task_id"] for row in await rows.connection.fetch("SELECT task_id FROM unknown_task")}


async def register(rows: Rows, handler: str = "one.only") -> UUID:
    worker = uuid4()
    await workers.register(
        rows.connection, worker, host="h", pid=1, version="1", queues=["default"], handlers=[handler]
    )
    return worker


async def wake_known(rows: Rows, worker: UUID, at_most: int = 10) -> tuple[set[UUID], bool]:
    hints, more = await unknown_tasks.wake_known(rows.connection, worker, ["default"], ["one.only"], at_most)
    return {hint.task_id for hint in hints}, more


async def test_a_worker_wakes_the_tasks_whose_code_it_has_and_that_still_wait_for_it(rows: Rows) -> None:
    """Another worker drains. A task that was claimed since, or that waits no more, is only forgotten."""
    woken, claimed_since, retried_since, elsewhere = await unknown(rows, 4)
    await rows.connection.execute("UPDATE task SET epoch = epoch + 1 WHERE id = $1", claimed_since)
    await rows.connection.execute("UPDATE task SET status = 'retry' WHERE id = $1", retried_since)
    await rows.connection.execute("UPDATE unknown_task SET queue = 'elsewhere' WHERE task_id = $1", elsewhere)
    draining, worker = await register(rows), await register(rows)
    await workers.ask_to_drain(rows.connection, draining)
    before = await written(rows)
    assert await wake_known(rows, draining) == (set(), False)
    assert (await changed(rows, before), len(await left(rows))) == (set(), 4)
    assert await wake_known(rows, worker) == ({woken}, False)
    assert (await changed(rows, before), await left(rows)) == ({woken}, {elsewhere})
    (claimed,) = await rows.claim_all()
    assert claimed.lease.task_id == woken


@pytest.mark.parametrize(
    ("has", "wakes"),
    [
        (["one.only"], False),
        (["one.other", "one.third"], False),
        (["one.third", "one.other", "one.only"], True),
    ],
)
async def test_a_worker_wakes_a_task_that_needs_several_handlers_only_if_it_has_all(
    rows: Rows, has: list[str], wakes: bool
) -> None:
    (task,) = await unknown(rows, 1)
    await rows.connection.execute("UPDATE unknown_task SET handler = $1", joined_handlers(["one.other", "one.only"]))
    worker = await register(rows)
    hints, _ = await unknown_tasks.wake_known(rows.connection, worker, ["default"], has, 10)
    assert {hint.task_id for hint in hints} == ({task} if wakes else set())


async def test_a_worker_wakes_no_more_tasks_than_it_has_room_for_and_says_whether_there_may_be_more(rows: Rows) -> None:
    made, worker = set(await unknown(rows, 3)), await register(rows)
    first, more = await wake_known(rows, worker, at_most=2)
    assert (len(first), more, await left(rows)) == (2, True, made - first)
    assert await wake_known(rows, worker, at_most=2) == (made - first, False)


async def test_a_task_that_another_transaction_holds_is_left_to_the_next_turn(rows: Rows, another: Open) -> None:
    held, free = await unknown(rows, 2)
    worker, other = await register(rows), await another()
    await wait_for_no_lock(rows)
    async with other.connection.transaction():
        await other.connection.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", held)
        assert await wake_known(rows, worker) == ({free}, False)
    assert await left(rows) == {held}
    assert await wake_known(rows, worker) == ({held}, False)


async def test_a_task_that_is_put_off_again_while_a_worker_wakes_it_is_remembered(rows: Rows, another: Open) -> None:
    """Another worker without the code claimed it since the worker with the code began to look."""
    (task,) = await unknown(rows, 1)
    worker, other = await register(rows), await another()
    async with other.connection.transaction():
        await other.connection.execute("UPDATE unknown_task SET epoch = epoch + 1 WHERE task_id = $1", task)
        waking = asyncio.create_task(wake_known(rows, worker))
        await until_waiting(other.connection)
    await waking
    assert await left(rows) == {task}
