"""What a worker's heartbeat learns of its leases, each beside those of another worker and those that have ended."""

from __future__ import annotations

from datetime import timedelta

from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.claims import Claimed, Renewal
from leasehold.transitions.settlements import Completion
from tests.factories import Rows, stale
from tests.transitions.conftest import Open

TTL = 30.0


async def cancelled(rows: Rows, *, cancelable: bool = True) -> Claimed:
    """A running step whose job is asked to stop."""
    claimed = await rows.leased()
    await rows.connection.execute("UPDATE task SET cancelable = $2 WHERE id = $1", claimed.lease.task_id, cancelable)
    await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")
    return claimed


async def test_a_worker_hears_of_the_cancels_of_its_own_running_steps(rows: Rows, another: Open) -> None:
    mine, unstoppable, of_another = await cancelled(rows), await cancelled(rows, cancelable=False), await another()
    others = [await rows.leased(), await cancelled(of_another), unstoppable]
    ended = await cancelled(rows)
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    asked = [one.lease.task_id for one in (mine, ended, *others)]
    assert await claims.to_cancel(rows.connection, rows.terms.owner, asked) == [mine.lease.task_id]
    assert await claims.to_cancel(rows.connection, rows.terms.owner, asked[1:]) == []


async def test_a_renewal_says_of_each_lease_whether_it_holds_and_whether_to_stop(rows: Rows, another: Open) -> None:
    mine, stopping, unstoppable = await rows.leased(), await cancelled(rows), await cancelled(rows, cancelable=False)
    of_another, ended = await (await another()).leased(), await rows.leased()
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    retaken = await rows.leased()
    leases = [one.lease for one in (mine, stopping, unstoppable, of_another, ended)]
    leases.append(stale(retaken.lease, epoch=retaken.lease.epoch + 1))
    before = await rows.task(of_another.lease.task_id)
    found = {one.task_id: one for one in await claims.renew(rows.connection, rows.terms.owner, leases, TTL)}
    kept, lost = (True, True), (False, False)
    said = [(mine, kept, False), (stopping, kept, True), (unstoppable, kept, False), (of_another, lost, False)]
    for claimed, (renewed, is_valid), must_stop in [*said, (ended, lost, False), (retaken, lost, False)]:
        task_id = claimed.lease.task_id
        assert found[task_id] == Renewal(task_id, renewed, is_valid, must_stop)
    assert await rows.task(of_another.lease.task_id) == before


async def test_after_a_reconnect_a_worker_finds_its_leases_that_were_not_renewed_since(
    rows: Rows, another: Open
) -> None:
    forgotten, renewed, ended = [await rows.leased() for _ in range(3)]
    await (await another()).leased()
    await settlements.complete(rows.connection, [Completion(ended.lease)])
    instant = await rows.connection.fetchval("SELECT clock_timestamp()")
    await claims.renew(rows.connection, rows.terms.owner, [renewed.lease], TTL)
    await rows.leased()  # claimed since
    owner = rows.terms.owner
    expected = {forgotten.lease.task_id: forgotten.lease.epoch}
    assert await claims.owned_before(rows.connection, owner, instant, TTL) == expected
    assert await claims.owned_before(rows.connection, owner, instant - timedelta(minutes=1), TTL) == {}


async def test_a_worker_locks_those_of_the_tasks_that_nobody_has_locked_and_no_others(
    rows: Rows, another: Open
) -> None:
    """It gives the tasks back without waiting. Their jobs are locked with them."""
    free, locked, of_locked_job, unnamed = [await rows.leased() for _ in range(4)]
    first, second = (await another()).connection, (await another()).connection
    asked = [one.lease.task_id for one in (free, locked, of_locked_job)]
    await rows.connection.execute("SET lock_timeout = '1s'")
    async with first.transaction(), second.transaction():
        await first.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", locked.lease.task_id)
        await first.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", of_locked_job.job_id)
        async with rows.connection.transaction():
            assert await claims.lock_unlocked(rows.connection, asked) == {free.lease.task_id}
            for table, kept in (("task", unnamed.lease.task_id), ("job", unnamed.job_id)):
                left = await second.fetch(f"SELECT id FROM {table} FOR UPDATE SKIP LOCKED")
                assert kept in {row["id"] for row in left}
                assert not {free.lease.task_id, free.job_id} & {row["id"] for row in left}
