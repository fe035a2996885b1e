"""What a hint and a poll claim, and what they leave: each condition of the two statements by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.claims import LeaseTerms
from leasehold.transitions.settlements import Completion
from tests.factories import ONE, THREE, Rows, terms
from tests.transitions.conftest import Open

PAUSE = "INSERT INTO paused_queue (queue, reason) VALUES ($1, 'r')"


async def set_task(rows: Rows, task_id: UUID, **columns: Any) -> None:
    names = list(columns)
    changes = ", ".join(f"{name} = ${place}" for place, name in enumerate(names, 2))
    await rows.connection.execute(f"UPDATE task SET {changes} WHERE id = $1", task_id, *columns.values())


async def due_since(rows: Rows, task_id: UUID, seconds: float) -> None:
    await rows.connection.execute(
        "UPDATE task SET available_at = clock_timestamp() - make_interval(secs => $2) WHERE id = $1", task_id, seconds
    )


async def submitted(rows: Rows, count: int = 1, tenant: str = "t", **columns: Any) -> list[UUID]:
    return [announced.hint.task_id for announced in await rows.submit(ONE, count, tenant, **columns)]


async def hinted(rows: Rows, task_id: UUID, by: LeaseTerms | None = None, *, reclaim: bool = False) -> bool:
    """Whether the hint of the task claims it."""
    return bool(await claims.claim(rows.connection, by or rows.terms, [task_id], reclaim=reclaim))


async def polled(rows: Rows, limit: int = 100, queues: tuple[str, ...] = ("default",), **asked: Any) -> list[UUID]:
    """What a poll claims, in the order of the tenants' turns."""
    found = await claims.poll(rows.connection, rows.terms, queues, limit, **asked)
    return [claimed.lease.task_id for claimed in found.claimed]


# --- by a hint


@pytest.mark.parametrize(("paused", "is_claimed"), [("default", False), ("elsewhere", True)])
async def test_a_hint_of_a_paused_queue_claims_nothing(rows: Rows, paused: str, *, is_claimed: bool) -> None:
    (task_id,) = await submitted(rows)
    await rows.connection.execute(PAUSE, paused)
    assert await hinted(rows, task_id) is is_claimed


@pytest.mark.parametrize("status", ["pending", "retry", "waiting"])
async def test_a_hint_claims_what_is_due(rows: Rows, status: str) -> None:
    (task_id,) = await submitted(rows)
    await set_task(rows, task_id, status=status)
    await due_since(rows, task_id, -60.0)
    assert not await hinted(rows, task_id)
    await due_since(rows, task_id, 0.0)
    assert await hinted(rows, task_id)


async def test_a_hint_of_a_job_that_waits_for_its_time_or_for_a_worker_outside_claims_its_task(rows: Rows) -> None:
    for status in ("pending", "waiting_worker"):
        (task_id,) = await submitted(rows)
        await rows.connection.execute("UPDATE job SET status = $1", status)
        assert await hinted(rows, task_id), status
        await rows.connection.execute("DELETE FROM job")


async def test_an_owner_claims_its_own_task_again_without_a_loss_and_nobody_else_s(rows: Rows) -> None:
    task_id = (await rows.leased()).lease.task_id
    stranger = terms()
    assert not await hinted(rows, task_id)
    assert not await hinted(rows, task_id, stranger, reclaim=True)
    assert await hinted(rows, task_id, reclaim=True)
    task = await rows.task(task_id)
    assert (task["epoch"], task["losses"], task["lease_owner"]) == (2, 0, rows.terms.owner)
    await rows.lapse(task_id)
    assert await hinted(rows, task_id, stranger, reclaim=True)
    task = await rows.task(task_id)
    assert (task["epoch"], task["losses"], task["lease_owner"]) == (3, 1, stranger.owner)


async def test_a_step_of_a_job_that_is_cancelled_is_not_taken_over(rows: Rows) -> None:
    first = await rows.leased(THREE)
    await rows.lapse(first.lease.task_id)
    await jobs.request_cancel(rows.connection, [first.job_id], "t", reason="r", by="b")
    assert not await hinted(rows, first.lease.task_id)
    assert not await hinted(rows, first.lease.task_id, reclaim=True)


# --- by a poll


@pytest.mark.parametrize(("paused", "is_claimed"), [("default", False), ("elsewhere", True)])
async def test_a_poll_claims_nothing_of_a_paused_queue(rows: Rows, paused: str, *, is_claimed: bool) -> None:
    await submitted(rows)
    await rows.connection.execute(PAUSE, paused)
    assert bool(await polled(rows)) is is_claimed


@pytest.mark.parametrize("status", ["pending", "retry", "waiting"])
async def test_a_poll_finds_what_is_due_of_every_tenant_whatever_its_status_queue_and_priority(
    rows: Rows, status: str
) -> None:
    """And no task twice: the tenants are looked for by queue and priority."""
    tasks = [
        (await submitted(rows, tenant=tenant, priority=priority))[0]
        for tenant in ("a", "b", "c")
        for priority in (0, 1, 2)
    ]
    elsewhere = [(await submitted(rows, tenant=tenant))[0] for tenant in ("a", "b", "c", "d")]
    for task_id in tasks + elsewhere:
        await set_task(rows, task_id, status=status)
    for task_id in elsewhere:
        await set_task(rows, task_id, queue="elsewhere")
    assert sorted(await polled(rows)) == sorted(tasks)
    assert sorted(await polled(rows, queues=("default", "elsewhere"))) == sorted(elsewhere)


async def test_a_poll_sees_nothing_that_is_due_for_longer_than_its_window(rows: Rows) -> None:
    """Of no tenant: the first is found by another scan than those after it."""
    old, new = [], []
    for tenant in ("a", "b"):
        (one, other) = await submitted(rows, 2, tenant)
        await due_since(rows, one, 60.0)
        await due_since(rows, other, 1.0)
        old.append(one)
        new.append(other)
    assert sorted(await polled(rows, back=30.0)) == sorted(new)
    assert sorted(await polled(rows)) == sorted(old)


@pytest.mark.parametrize("what", ["is of another queue", "has ended", "is due for too long"])
async def test_a_tenant_that_has_nothing_for_a_poll_takes_no_turn(rows: Rows, what: str) -> None:
    """Turns cost a count of all that runs. One tenant comes before the one that has work, and one comes after it."""
    for tenant in ("a", "z"):
        (task_id,) = await submitted(rows, tenant=tenant)
        if what == "is of another queue":
            await set_task(rows, task_id, queue="elsewhere")
        elif what == "is due for too long":
            await due_since(rows, task_id, 60.0)
        else:
            (claimed,) = await rows.claim_all()
            await settlements.complete(rows.connection, [Completion(claimed.lease)])
    (task_id,) = await submitted(rows, tenant="m")
    found = await claims.poll(rows.connection, rows.terms, ["default"], 100, back=30.0)
    assert [claimed.lease.task_id for claimed in found.claimed] == [task_id]
    assert found.running is None


@pytest.mark.parametrize(
    ("here", "asked", "claimed"),
    [
        ({}, {}, {"here": 3, "other": 3}),
        ({"here": (1, 2)}, {}, {"here": 2, "other": 3}),
        ({"here": (1, 0)}, {}, {"here": 0, "other": 3}),
        ({"here": (1, None)}, {"other_room": 1}, {"here": 3, "other": 1}),
        ({"here": (1, 1)}, {"other_room": 2}, {"here": 1, "other": 2}),
        ({"here": (1, None)}, {"overdue": 10.0}, {"here": 0, "other": 0}),
        ({"here": (1, None)}, {"overdue": 10.0, "other_overdue": 1.0}, {"here": 0, "other": 3}),
        ({"here": (1, None)}, {"overdue": 3.0, "other_overdue": 10.0}, {"here": 3, "other": 3}),
    ],
)
async def test_a_poll_gives_each_tenant_its_room_and_leaves_new_tasks_to_their_hints(
    rows: Rows, here: Mapping[str, tuple[int, int | None]], asked: dict[str, Any], claimed: dict[str, int]
) -> None:
    """The tasks are due for five seconds."""
    tasks = {tenant: await submitted(rows, 3, tenant) for tenant in ("here", "other")}
    for task_id in (task_id for of_tenant in tasks.values() for task_id in of_tenant):
        await due_since(rows, task_id, 5.0)
    found = set(await polled(rows, shares=here, **asked))
    assert {tenant: len(found & set(of_tenant)) for tenant, of_tenant in tasks.items()} == claimed


async def test_a_retry_has_no_hint_to_be_left_to(rows: Rows) -> None:
    pending, retry = await submitted(rows, 2)
    await set_task(rows, retry, status="retry")
    assert await polled(rows, overdue=60.0) == [retry]
    assert await polled(rows) == [pending]


@pytest.mark.parametrize(
    ("room", "due", "is_held_back"), [(0, 0, False), (0, 1, True), (1, 1, False), (1, 2, True), (None, 9, False)]
)
async def test_a_poll_says_whether_a_tenant_has_more_that_is_due_than_it_has_room_for(
    rows: Rows, room: int | None, due: int, *, is_held_back: bool
) -> None:
    """What is not due, of another queue, or of another tenant is not held back."""
    later, elsewhere, *due_tasks = await submitted(rows, 2 + due, "here")
    await due_since(rows, later, -60.0)
    await set_task(rows, elsewhere, queue="elsewhere")
    for task_id in (*due_tasks, elsewhere, *await submitted(rows, 3, "other")):
        await due_since(rows, task_id, 5.0)
    found = await claims.poll(rows.connection, rows.terms, ["default"], 100, shares={"here": (1, room)})
    assert found.held_back is is_held_back
    assert found.oldest is not None
    assert 5.0 <= found.oldest < 60.0
    claimed = {claimed.lease.task_id for claimed in found.claimed} & set(due_tasks)
    assert len(claimed) == (due if room is None else min(due, room))


async def test_a_poll_passes_over_a_job_that_another_transaction_has_locked(rows: Rows, another: Open) -> None:
    locked, free = await submitted(rows, 2)
    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '2s'")
    async with other.transaction():
        await other.execute("SELECT FROM job JOIN task ON task.job_id = job.id WHERE task.id = $1 FOR UPDATE", locked)
        assert await polled(rows) == [free]
    assert await polled(rows) == [locked]


@pytest.mark.parametrize(("seconds", "first"), [(20.0, "high"), (40.0, "low")])
async def test_thirty_seconds_of_waiting_are_worth_one_priority(rows: Rows, seconds: float, first: str) -> None:
    (high,), (low,) = await submitted(rows, priority=0), await submitted(rows, priority=1)
    await due_since(rows, high, 1.0)
    await due_since(rows, low, 1.0 + seconds)
    assert await polled(rows, 1) == [{"high": high, "low": low}[first]]
