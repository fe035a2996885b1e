"""A concurrency limit beside others: of another tenant with the same key, and of the same tenant with another key.
Neither what happens there nor who waits there changes anything here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.runtime.gather import cancel_and_wait
from leasehold.transitions import concurrency, jobs, limits, quarantine, runs, settlements
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.debounce import Debounced
from leasehold.transitions.jobs import AdmissionTerms
from leasehold.transitions.settlements import Failure
from tests.factories import ONE, Rows
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import NEIGHBOURS, debounced, finish, held, named, wait_at

K = ("t", "k")
SHARED = (EVERYBODY, "k")


async def admitted(rows: Rows, name: ConcurrencyLimitName = K, ended: Sequence[UUID] | None = None) -> int:
    return len(await concurrency.admit(rows.connection, [name], ended))


async def places(rows: Rows, but: UUID | None = None) -> list[tuple[Any, ...]]:
    """All jobs at all limits, but one."""
    found = await rows.connection.fetch("SELECT * FROM gate_job WHERE job_id IS DISTINCT FROM $1 ORDER BY 1, 2, 3", but)
    return [tuple(row) for row in found]


async def bounds(rows: Rows) -> dict[ConcurrencyLimitName, tuple[int | None, int | None]]:
    found = await rows.connection.fetch("SELECT tenant_id, key, at_most, per_minute FROM gate")
    return {(row["tenant_id"], row["key"]): (row["at_most"], row["per_minute"]) for row in found}


async def wait_for_no_lock(rows: Rows) -> None:
    """From now on a statement fails that has to wait for another transaction."""
    await rows.connection.execute("SET lock_timeout = '3s'")


async def declare(rows: Rows, *names: ConcurrencyLimitName, at_most: int) -> None:
    for tenant, key in names:
        await rows.connection.execute(
            "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ($1, $2, $3, true)", tenant, key, at_most
        )


# --- who has ended


@pytest.mark.parametrize("is_named", [True, False])
async def test_a_job_that_ended_elsewhere_frees_no_place_here(rows: Rows, is_named: bool) -> None:
    await rows.submit(ONE, tenant="u")
    await finish(rows)
    first, second = await wait_at(rows, ConcurrencyLimit(*K, at_most=1), count=2)
    assert await admitted(rows) == 1
    before = await places(rows)
    assert await admitted(rows, ended=[first] if is_named else None) == 0
    assert await places(rows) == before
    assert await held(rows) == {second}


@pytest.mark.parametrize("is_named", [True, False])
async def test_what_ended_within_the_minute_counts_at_its_rate_whatever_bounds_others_have(
    rows: Rows, is_named: bool
) -> None:
    for tenant, key in NEIGHBOURS:
        await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=9), tenant=tenant)
    made = await wait_at(rows, ConcurrencyLimit(*K, per_minute=2), count=4)
    assert await admitted(rows) == 2
    await finish(rows)
    assert await admitted(rows, ended=made[:2] if is_named else None) == 0


async def test_an_admission_forgets_no_job_that_ended_at_another_limit(rows: Rows) -> None:
    """Whoever ended it has yet to ask at which limits there is room now."""
    ended = {}
    for tenant, key in NEIGHBOURS:
        (ended[tenant, key],) = await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=1), tenant=tenant)
        assert await admitted(rows, (tenant, key)) == 1
    await finish(rows)
    await wait_at(rows, ConcurrencyLimit(*K, at_most=1))
    assert await admitted(rows) == 1
    for name, job_id in ended.items():
        assert await concurrency.limits_of(rows.connection, [job_id]) == [name]
    assert sorted(await concurrency.limits_of(rows.connection, [*ended.values()])) == sorted(NEIGHBOURS)


# --- the places of a limit that tenants share


@pytest.mark.parametrize("per_minute", [None, 60])
@pytest.mark.parametrize(("at_most", "of_one"), [(3, 3), (4, 3), (5, 4)])
async def test_of_four_shared_places_or_more_one_is_kept_for_tenants_that_have_none(
    rows: Rows, at_most: int, of_one: int, per_minute: int | None
) -> None:
    shared = ConcurrencyLimit(*SHARED, at_most, per_minute)
    await wait_at(rows, shared, count=9)
    assert await admitted(rows, SHARED) == of_one
    assert await admitted(rows, SHARED) == 0
    await wait_at(rows, shared, tenant="u", count=2)
    assert await admitted(rows, SHARED) == at_most - of_one


async def test_a_tenant_s_share_counts_what_it_has_inside_at_this_limit_alone(rows: Rows) -> None:
    """It may take the last of three places, because it has two. Neither its waiting jobs, nor its jobs at other limits,
    nor the number of these limits count.
    """
    shared = ConcurrencyLimit(*SHARED, at_most=3)
    for tenant in ("t", "u", "v", "w"):
        await wait_at(rows, ConcurrencyLimit(tenant, "k", at_most=9), tenant=tenant, count=5)
        assert await admitted(rows, (tenant, "k")) == 5
    for key in ("l", "m", "n"):
        await wait_at(rows, ConcurrencyLimit(EVERYBODY, key, at_most=9))
        assert await admitted(rows, (EVERYBODY, key)) == 1
    await wait_at(rows, shared, count=2)
    assert await admitted(rows, SHARED) == 2
    await wait_at(rows, shared, count=6)
    assert await admitted(rows, SHARED) == 1


async def test_at_a_shared_limit_without_places_a_tenant_takes_all_entries(rows: Rows) -> None:
    await wait_at(rows, ConcurrencyLimit(*SHARED, per_minute=3), count=5)
    assert await admitted(rows, SHARED) == 3


# --- locks


async def test_an_admission_waits_for_none_at_another_limit(rows: Rows, another: Open) -> None:
    other = (await another()).connection
    names = [*NEIGHBOURS, SHARED]
    for tenant, key in names:
        await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=1))
    await wait_at(rows, ConcurrencyLimit(*K, at_most=1))
    await wait_for_no_lock(rows)
    async with other.transaction():
        await rooms_of(other, sorted(names), None)
        assert await admitted(rows) == 1


async def test_a_submission_waits_for_no_admission_at_a_declared_limit_whose_bounds_it_does_not_take(
    rows: Rows, another: Open
) -> None:
    other = (await another()).connection
    names = [("u", "tenant"), (EVERYBODY, "queue:default")]
    await declare(rows, *names, at_most=7)
    await declare(rows, (EVERYBODY, "tenant"), at_most=2)
    await wait_for_no_lock(rows)
    async with other.transaction():
        await rooms_of(other, sorted(names), None)
        await wait_at(rows, ConcurrencyLimit("t", "tenant", declared_as=(EVERYBODY, "tenant")))
        await wait_at(rows, ConcurrencyLimit("u", "tenant", at_most=9))  # its job does not know of the declaration yet
    assert (await bounds(rows))["t", "tenant"] == (2, None)


async def test_a_limit_is_lifted_after_the_jobs_are_written_that_take_its_bounds(rows: Rows, another: Open) -> None:
    """The operator's transaction would not see the limit that such a job brings. It would keep the bounds, and hold the
    job for ever.
    """
    general = (EVERYBODY, "tenant")
    await limits.declare(rows.connection, [ONE], ConcurrencyLimit(*general, at_most=0))
    other = (await another()).connection
    async with rows.connection.transaction():
        await rows.submit(ONE, limits=[ConcurrencyLimit("t", "tenant", declared_as=general)])
        lifting = asyncio.create_task(limits.withdraw(other, *general))
        waiting = asyncio.create_task(until_waiting(rows.connection))
        await asyncio.wait([lifting, waiting], return_when=asyncio.FIRST_COMPLETED)
        await cancel_and_wait(waiting)
    assert len(await concurrency.admit(rows.connection, await lifting)) == 1
    assert await held(rows) == set()


@dataclass
class Abreast:
    """A connection. Each query that it has read waits for one of the other connection."""

    connection: Connection
    barrier: asyncio.Barrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    async def fetch(self, *arguments: Any) -> Any:
        found = await self.connection.fetch(*arguments)
        await self.barrier.wait()
        return found


async def test_two_submissions_at_one_declared_limit_do_not_deadlock(rows: Rows, another: Open) -> None:
    """If each first shared a lock to read the bounds, neither could then have the lock for itself."""
    name = ("t", "tenant")
    await declare(rows, name, at_most=5)
    barrier = asyncio.Barrier(2)

    async def lock(connection: Connection) -> None:
        async with connection.transaction():
            abreast = cast("Connection", Abreast(connection, barrier))
            await concurrency.lock_limits(abreast, [ConcurrencyLimit(*name, declared_as=name)])

    await asyncio.gather(lock(rows.connection), lock((await another()).connection))


async def test_a_retry_does_not_deadlock_with_an_admission(rows: Rows, another: Open) -> None:
    """The admission has locked the limit, and then forgets the job that has failed."""
    limit = ConcurrencyLimit(*K, at_most=1)
    (job_id,) = await wait_at(rows, limit)
    assert await admitted(rows) == 1
    (claimed,) = await rows.claim_all()
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "x", "", False, 0.0)])
    other = (await another()).connection
    async with other.transaction():
        await rooms_of(other, [K], ())
        terms = AdmissionTerms([limit])
        retrying = asyncio.create_task(jobs.replay(rows.connection, job_id, "t", terms=terms))
        await until_waiting(other)
        await rooms_of(other, [K], [job_id])
    assert await retrying == []
    assert await held(rows) == {job_id}
    assert await admitted(rows) == 1


# --- the rows of limits


async def test_a_limit_has_the_bounds_that_the_last_job_brought(rows: Rows) -> None:
    """A job that brings none changes none: it waits as the others do."""
    for tenant, key in NEIGHBOURS:
        await wait_at(rows, ConcurrencyLimit(tenant, key, 8, 8), tenant=tenant)
    for brought, expected in (
        ((1, None), (1, None)), ((2, None), (2, None)), ((None, 3), (None, 3)), ((None, 4), (None, 4)),
        ((None, None), (None, 4)), ((5, 6), (5, 6)), ((None, None), (5, 6)),
    ):  # fmt: skip
        await wait_at(rows, ConcurrencyLimit(*K, *brought))
        assert await bounds(rows) == {K: expected} | dict.fromkeys(NEIGHBOURS, (8, 8))


async def test_a_job_changes_no_bounds_that_an_operator_declared(rows: Rows) -> None:
    await declare(rows, K, at_most=1)
    await wait_at(rows, ConcurrencyLimit(*K, at_most=9), count=3)
    assert await bounds(rows) == {K: (1, None)}
    assert await admitted(rows) == 1


@pytest.mark.parametrize(("is_declared", "brought"), [(True, 9), (False, None)])
async def test_a_retry_changes_no_bounds_that_an_operator_declared_or_for_which_it_brings_none(
    rows: Rows, is_declared: bool, brought: int | None
) -> None:
    """Unlike a submission, it locks the limit's row."""
    await declare(rows, K, at_most=1)
    await rows.connection.execute("UPDATE gate SET declared = $1", is_declared)
    async with rows.connection.transaction():
        await concurrency.lock_limits(rows.connection, [ConcurrencyLimit(*K, at_most=brought)])
    assert await bounds(rows) == {K: (1, None)}


async def test_a_job_changes_the_bounds_of_a_limit_whose_key_another_of_its_limits_has(rows: Rows) -> None:
    for name in (K, SHARED):
        await wait_at(rows, ConcurrencyLimit(*name, at_most=9))
    await rows.submit(ONE, limits=[ConcurrencyLimit(*K, at_most=1), ConcurrencyLimit(*SHARED, at_most=9)])
    assert await bounds(rows) == {K: (1, None), SHARED: (9, None)}


async def test_a_job_that_brings_the_bounds_of_the_limit_writes_no_new_row(rows: Rows) -> None:
    """A busy limit would leave a dead row for each job."""
    limit, place = ConcurrencyLimit(*K, at_most=1), "SELECT ctid::text FROM gate"
    await wait_at(rows, limit)
    before = await rows.connection.fetchval(place)
    await wait_at(rows, limit)
    async with rows.connection.transaction():
        await concurrency.lock_limits(rows.connection, [limit])
    assert await rows.connection.fetchval(place) == before


async def test_the_sweeper_gets_page_by_page_each_limit_at_which_a_job_waits(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None at which all are admitted, and none that is set aside; of that, others may have the tenant or the key."""
    monkeypatch.setattr(quarantine, "BACKOFF", (1200,))
    expected = sorted([K, SHARED, ("u", "l")])
    for tenant, key in NEIGHBOURS:
        await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=1), tenant=tenant)
        assert await admitted(rows, (tenant, key)) == 1
    await declare(rows, (EVERYBODY, "l"), at_most=1)
    for tenant, key in expected:
        await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=0))
    for is_set_aside in (False, True):
        if is_set_aside:
            await quarantine.set_aside(rows.connection, concurrency.LIMITS, "t/k", ValueError())
            expected.remove(K)
        pages = [[("", "")]]
        while pages[-1] and len(pages) < 9:
            pages.append(await concurrency.with_waiting_jobs(rows.connection, pages[-1][-1], page_size=1))
        assert pages[1:] == [*([name] for name in expected), []]


async def test_a_run_that_a_debounce_changes_leaves_all_others_where_they_wait(rows: Rows) -> None:
    for tenant, key in (K, *NEIGHBOURS):
        await wait_at(rows, ConcurrencyLimit(tenant, key, at_most=1), tenant=tenant, count=2)
        assert await admitted(rows, (tenant, key)) == 1
    async with rows.connection.transaction():
        waiting = await runs.create(rows.connection, debounced("alice"))
    before, own = await places(rows, waiting.id), await concurrency.limits_of(rows.connection, [waiting.id])
    async with rows.connection.transaction():
        again = Debounced(new_id(), "debounced", "key", {"customer": "bob"}, 0.0)
        assert await runs.merge(rows.connection, "t", [debounced("bob")], [again]) == [waiting.id]
    assert await places(rows, waiting.id) == before
    (now,) = await concurrency.limits_of(rows.connection, [waiting.id])
    assert [now] != own


async def test_a_limit_that_an_operator_declared_is_kept_when_another_of_its_key_is_forgotten(rows: Rows) -> None:
    await wait_at(rows, ConcurrencyLimit("t", "other", at_most=0))
    await rows.connection.execute("INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('t', 'k', 1, false)")
    declared = [("t", "l"), ("u", "k"), SHARED]
    await declare(rows, *declared, at_most=1)
    await concurrency.forget_unused_limits(rows.connection)
    assert await named(rows, "gate") == {*declared, ("t", "other")}


async def test_a_limit_at_which_a_job_is_just_being_written_is_kept_and_not_waited_for(
    rows: Rows, another: Open
) -> None:
    await rows.connection.execute(
        "INSERT INTO gate (tenant_id, key, at_most, declared) VALUES ('t', 'k', 1, false), ('t', 'l', 1, false)"
    )
    other = await another()
    await wait_for_no_lock(rows)
    async with other.connection.transaction():
        await other.submit(ONE, limits=[ConcurrencyLimit(*K, at_most=1)])
        await concurrency.forget_unused_limits(rows.connection)
        assert await named(rows, "gate") == {K}
    assert await admitted(rows) == 1
