"""The rows of hints that were not published in time: who takes them, and that a bad one harms no other."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import uuid4

import pytest

from leasehold.broker import outbox
from leasehold.broker.outbox import HintBatch
from tests.factories import Rows
from tests.transitions.conftest import Open


async def due(rows: Rows, number: int) -> list[int]:
    """The ids of so many rows that are due, each of another submission."""
    ids = [hint.outbox_id for _ in range(number) for hint in await rows.submit()]
    await rows.connection.execute("UPDATE outbox SET relay_at = clock_timestamp() - interval '1 second'")
    return [one for one in ids if one is not None]


async def times(rows: Rows) -> dict[int, datetime]:
    """When each row is due."""
    return {row["id"]: row["relay_at"] for row in await rows.connection.fetch("SELECT id, relay_at FROM outbox")}


async def test_two_relays_take_different_hints_and_neither_waits(rows: Rows, another: Open) -> None:
    ids, other = await due(rows, 3), await another()
    async with rows.connection.transaction(), other.connection.transaction():
        await other.connection.execute("SET LOCAL lock_timeout = '2s'")
        first = await outbox.take(rows.connection, 2)
        second = await outbox.take(other.connection, 3)
    assert sorted(one.outbox_id or 0 for one in first + second) == sorted(ids)
    assert (len(first), len(second)) == (2, 1)


async def test_a_hint_that_was_taken_and_not_confirmed_is_due_again_in_ten_seconds(rows: Rows) -> None:
    await due(rows, 1)
    before = await rows.connection.fetchval("SELECT clock_timestamp()")
    await outbox.take(rows.connection, 1)
    after = await rows.connection.fetchval("SELECT clock_timestamp()")
    (relay_at,) = (await times(rows)).values()
    assert before <= relay_at - timedelta(seconds=10) <= after
    assert await outbox.take(rows.connection, 1) == []


async def test_a_hint_that_cannot_be_sent_is_postponed_to_the_end_of_its_own_quarantine(rows: Rows) -> None:
    ids = await due(rows, 4)
    first, of_another_duty, _in_none, quarantined_too = ids
    quarantined = (
        ("relay", first, 1), ("sweeper", first, 2), ("sweeper", of_another_duty, 3), ("relay", quarantined_too, 4),
    )  # fmt: skip
    for duty, unit, hours in quarantined:
        await rows.connection.execute(
            "INSERT INTO quarantine (duty, unit, failures, error, retry_at)"
            " VALUES ($1, $2, 1, '{}', date_trunc('hour', clock_timestamp()) + make_interval(hours => $3))",
            duty,
            str(unit),
            hours,
        )
    before = await times(rows)
    for outbox_id in ids[2::-1]:
        await outbox.put_off(rows.connection, outbox_id, "relay")
    retry_at = await rows.connection.fetchval(
        "SELECT retry_at FROM quarantine WHERE duty = 'relay' AND unit = $1", str(first)
    )
    assert await times(rows) == before | {first: retry_at}


async def test_a_hint_that_cannot_be_sent_is_dropped_alone(rows: Rows) -> None:
    first, *others = await due(rows, 3)
    await outbox.drop(rows.connection, first)
    assert sorted(await times(rows)) == sorted(others)


def test_a_submission_of_no_hint_or_of_one_has_no_batch() -> None:
    one, two = uuid4(), uuid4()
    assert HintBatch.of([]) is None
    assert HintBatch.of([{"batch_id": None, "task_id": one}]) is None
    assert HintBatch.of([{"batch_id": 7, "task_id": one}]) == HintBatch(7, {one})
    batch = HintBatch.of([{"batch_id": 7, "task_id": one}, {"batch_id": 7, "task_id": two}])
    assert batch == HintBatch(7, {one, two})


async def test_hints_are_not_deleted_within_a_transaction(rows: Rows) -> None:
    """Its commit would not wait for the disk."""
    async with rows.connection.transaction():
        with pytest.raises(RuntimeError, match="outside of a transaction"):
            await outbox.delete_confirmed(rows.connection, [])
