"""Which tasks a worker gives back because it does not know them, and when: the worker's clock is the test's."""

from __future__ import annotations

import pytest

from leasehold.db.database import connect
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.leases import orphans as orphans_module
from leasehold.worker.leases.orphans import Orphans
from tests.factories import Rows
from tests.support.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(orphans_module, "monotonic", clock)
    return clock


@pytest.fixture
def orphans(rows: Rows, clock: Clock) -> Orphans:
    return Orphans(rows.terms.owner, rows.terms.ttl)


async def is_running(rows: Rows, lease: Lease) -> bool:
    return bool((await rows.task(lease.task_id))["status"] == "running")


def is_searching(orphans: Orphans) -> bool:
    return orphans.is_searching


async def test_a_task_is_given_back_when_two_looks_a_second_apart_do_not_know_it(
    orphans: Orphans, clock: Clock, rows: Rows
) -> None:
    """At the first one, the answer to its claim may be on its way."""
    lease = (await rows.leased()).lease
    assert not is_searching(orphans)
    await orphans.begin_search(rows.connection)
    later = (await rows.leased()).lease
    for after, runs in ((5.0, True), (5.999, True), (6.0, False)):
        assert is_searching(orphans)
        clock.now = 1000.0 + after
        assert await orphans.release(rows.connection, []) == []
        assert await is_running(rows, lease) is runs
    assert not is_searching(orphans)
    assert (await rows.task(lease.task_id))["losses"] == 0
    assert await is_running(rows, later)  # its claim is younger than the search


async def test_a_task_whose_claim_is_answered_between_the_looks_is_kept(
    orphans: Orphans, clock: Clock, rows: Rows
) -> None:
    lease = (await rows.leased()).lease
    await orphans.begin_search(rows.connection)
    await orphans.release(rows.connection, [])
    for _ in range(3):
        clock.now += 1.0
        assert await orphans.release(rows.connection, [lease.task_id]) == []
        assert await is_running(rows, lease)
        assert is_searching(orphans)  # a lost lease's attempt has not stopped yet
    await rows.connection.execute("UPDATE task SET epoch = epoch + 1 WHERE id = $1", lease.task_id)
    await orphans.release(rows.connection, [])
    clock.now += 1.0
    await orphans.release(rows.connection, [])
    assert not await is_running(rows, lease)


async def test_each_task_is_looked_for_twice_with_the_same_epoch(orphans: Orphans, clock: Clock, rows: Rows) -> None:
    first = (await rows.leased()).lease
    await orphans.begin_search(rows.connection)
    await orphans.release(rows.connection, [])
    await rows.connection.execute("UPDATE task SET epoch = epoch + 1 WHERE id = $1", first.task_id)
    clock.now += 1.0
    await orphans.release(rows.connection, [])
    assert await is_running(rows, first)  # claimed anew meanwhile: that claim's answer may be on its way
    clock.now += 1.0
    await orphans.release(rows.connection, [])
    assert not await is_running(rows, first)


async def test_what_is_held_stays_and_the_search_goes_on_while_it_does(
    orphans: Orphans, clock: Clock, rows: Rows
) -> None:
    held, forgotten, cancelled = [await rows.leased() for _ in range(3)]
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="r", by="b")
    await orphans.begin_search(rows.connection)
    await orphans.release(rows.connection, [held.lease.task_id])
    clock.now += 1.0
    (ended,) = await orphans.release(rows.connection, [held.lease.task_id])
    assert ended.outcome == "cancelled"
    assert (await rows.job(cancelled.job_id))["status"] == "cancelled"
    assert (await rows.task(forgotten.lease.task_id))["status"] == "pending"
    assert await is_running(rows, held.lease)
    assert is_searching(orphans)
    await rows.connection.execute("UPDATE task SET lease_until = lease_until + interval '1 hour'")  # it was renewed
    await orphans.release(rows.connection, [held.lease.task_id])
    assert not is_searching(orphans)


@pytest.mark.parametrize("table", ["job", "task"])
async def test_a_task_that_somebody_has_locked_delays_no_other_and_is_given_back_later(
    orphans: Orphans, clock: Clock, rows: Rows, settings: Settings, table: str
) -> None:
    """The heartbeat gives tasks back: while it waits, it renews no lease."""
    locked, free = (await rows.leased()).lease, (await rows.leased()).lease
    await orphans.begin_search(rows.connection)

    async def look_twice() -> None:
        for _ in range(2):
            await orphans.release(rows.connection, [])
            clock.now += 1.0

    other = await connect(settings, "test")
    try:
        async with other.transaction():
            row = {"job": "SELECT job_id FROM task WHERE id = $1", "task": "SELECT $1::uuid"}[table]
            await other.execute(f"SELECT 1 FROM {table} WHERE id = ({row}) FOR UPDATE", locked.task_id)
            await rows.connection.execute("SET lock_timeout = '1s'")
            await look_twice()
            assert [await is_running(rows, lease) for lease in (locked, free)] == [True, False]
            assert is_searching(orphans)
    finally:
        await other.close()
    await look_twice()
    assert not await is_running(rows, locked)
    assert not is_searching(orphans)
