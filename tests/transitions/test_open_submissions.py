"""A submission in a transaction that stays open, as one of `submit_in` may, holds back nobody else at its limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from leasehold.cli.moving_rows import leave_shared_limits
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.transitions import concurrency, limits, quarantine
from leasehold.transitions.concurrency.room import rooms_of
from tests.factories import ONE, Rows
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import finish, held, wait_at
from tests.transitions.test_limits_beside_others import bounds, wait_for_no_lock

K, SHARED = ("t", "tenant"), (EVERYBODY, "queue:default")
OWN = [ConcurrencyLimit(*name, at_most=2) for name in (K, SHARED)]


async def admit(connection: Connection) -> None:
    await rooms_of(connection, sorted([K, SHARED]), None)


async def submit(connection: Connection) -> None:
    await Rows(connection).submit(ONE, limits=OWN)


async def change(connection: Connection) -> None:
    """A job brings other bounds."""
    await Rows(connection).submit(ONE, limits=[ConcurrencyLimit(*name, at_most=5) for name in (K, SHARED)])


async def lock(connection: Connection) -> None:
    """As a retry, a debounce, and a run that replaces others."""
    await concurrency.lock_limits(connection, OWN)


async def declare(connection: Connection) -> None:
    await limits.declare(connection, [ONE], ConcurrencyLimit(*SHARED, at_most=3))


async def declare_for_all(connection: Connection) -> None:
    await limits.declare(connection, [ONE], ConcurrencyLimit(EVERYBODY, "tenant", at_most=3))


async def move_away(connection: Connection) -> None:
    await leave_shared_limits(connection, "t")


@pytest.mark.parametrize("what", [admit, submit, change, lock, declare, declare_for_all, move_away])
async def test_an_open_submission_holds_back_nobody_at_its_limits(
    rows: Rows, another: Open, what: Callable[[Connection], Awaitable[None]]
) -> None:
    await wait_at(rows, *OWN)
    other = await another()
    await wait_for_no_lock(rows)
    async with other.connection.transaction():
        await submit(other.connection)
        async with rows.connection.transaction():
            await what(rows.connection)


@pytest.mark.parametrize(("is_declared", "brought"), [(True, 9), (False, None)])
async def test_an_open_submission_that_changes_no_bounds_holds_back_nobody(
    rows: Rows, another: Open, is_declared: bool, brought: int | None
) -> None:
    """An operator declared the limit, or the job brings none."""
    await wait_at(rows, *OWN)
    await rows.connection.execute("UPDATE gate SET declared = $1", is_declared)
    other = await another()
    await wait_for_no_lock(rows)
    async with other.connection.transaction():
        await other.submit(ONE, limits=[ConcurrencyLimit(*name, at_most=brought) for name in (K, SHARED)])
        async with rows.connection.transaction():
            await admit(rows.connection)


async def test_a_job_of_an_open_submission_is_admitted_after_the_commit_and_exceeds_no_limit(
    rows: Rows, another: Open
) -> None:
    limit = ConcurrencyLimit(*K, at_most=1)
    (first,) = await wait_at(rows, limit)
    other = await another()
    async with other.connection.transaction():
        await other.submit(ONE, limits=[limit])
        assert len(await concurrency.admit(rows.connection, [K])) == 1
        assert await held(rows) == set()
    assert await concurrency.admit(rows.connection, [K]) == []
    (second,) = await held(rows)
    await finish(rows)
    assert len(await concurrency.admit(rows.connection, [K], [first])) == 1
    assert second not in await held(rows)


async def test_transactions_that_submit_at_the_same_limits_in_any_order_do_not_deadlock(
    rows: Rows, another: Open
) -> None:
    """As loops over the same customers in two orders."""
    await wait_at(rows, *OWN)
    other = await another()
    for one in (rows, other):
        await wait_for_no_lock(one)
    async with rows.connection.transaction(), other.connection.transaction():
        for one, limit in ((rows, OWN[0]), (other, OWN[1]), (rows, OWN[1]), (other, OWN[0])):
            await one.submit(ONE, limits=[limit])


async def test_a_limit_that_another_transaction_keeps_locked_delays_no_other_limit(rows: Rows, another: Open) -> None:
    """The leading worker serves many limits at once. It takes the locked ones in a later turn."""
    free, locked = ("t", "a"), ("t", "b")
    (at_free,) = await wait_at(rows, ConcurrencyLimit(*free, at_most=1))
    (at_locked,) = await wait_at(rows, ConcurrencyLimit(*locked, at_most=1))
    (at_both,) = await wait_at(rows, *(ConcurrencyLimit("u", key, at_most=9) for key in "ab"), tenant="u")
    names = [free, locked, ("u", "a"), ("u", "b")]
    other = (await another()).connection
    await wait_for_no_lock(rows)
    async with other.transaction():
        await concurrency.lock_limits(
            other, [ConcurrencyLimit(*locked, at_most=1), ConcurrencyLimit("u", "b", at_most=9)]
        )
        assert len(await concurrency.admit_each(rows.connection, names)) == 1
        assert await held(rows) == {at_locked, at_both}
    assert at_free not in await held(rows)
    assert len(await concurrency.admit_each(rows.connection, names)) == 2
    assert await held(rows) == set()
    assert await quarantine.list_units(rows.connection) == []


async def test_a_locked_limit_keeps_the_places_of_jobs_that_ended_until_somebody_has_its_lock(
    rows: Rows, another: Open
) -> None:
    """Who has the lock may count or delete them just now."""
    (ended,) = await wait_at(rows, ConcurrencyLimit(*K, at_most=1))
    await concurrency.admit(rows.connection, [K])
    await finish(rows)
    (waiting,) = await wait_at(rows, ConcurrencyLimit(*K, at_most=1))
    other = (await another()).connection
    await wait_for_no_lock(rows)
    async with other.transaction():
        await rooms_of(other, [K], ())
        assert await concurrency.admit_each(rows.connection, [K]) == []
        assert await concurrency.limits_of(rows.connection, [ended]) == [K]
    assert len(await concurrency.admit_each(rows.connection, [K])) == 1
    assert waiting not in await held(rows)


async def test_a_job_brings_its_bounds_to_a_limit_beside_an_open_submission(rows: Rows, another: Open) -> None:
    await wait_at(rows, *OWN)
    other = await another()
    async with other.connection.transaction():
        await submit(other.connection)
        await change(rows.connection)
    assert await bounds(rows) == {K: (5, None), SHARED: (5, None)}
