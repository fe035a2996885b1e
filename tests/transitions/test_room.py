"""The room of a concurrency limit, to the job and to the second: who ends gives a place back, and no entry."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from leasehold.domain.concurrency_limit import EVERYBODY, ConcurrencyLimit
from leasehold.transitions import claims, concurrency, jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion
from tests.factories import ONE, Rows

NAME = ("t", "k")


async def held(rows: Rows, count: int, key: str = "k", **bounds: Any) -> list[UUID]:
    """Jobs that wait at a limit with these bounds."""
    made = [jobs.NewJob(ONE, "t", limits=[ConcurrencyLimit("t", key, **bounds)]) for _ in range(count)]
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, made)
    return [job.id for job in made]


async def admitted(rows: Rows, ended: list[UUID] | None = None) -> int:
    return len(await concurrency.admit(rows.connection, [NAME], ended))


async def finish(rows: Rows, count: int) -> list[UUID]:
    found = await claims.claim_due(rows.connection, rows.terms, ["default"], count)
    assert len(found) == count
    await settlements.complete(rows.connection, [Completion(claimed.lease) for claimed in found])
    return [claimed.job_id for claimed in found]


async def aged(rows: Rows, seconds: float) -> None:
    """All admissions happened that long ago."""
    await rows.connection.execute(
        "UPDATE gate_job SET admitted_at = clock_timestamp() - make_interval(secs => $1) WHERE admitted_at IS NOT NULL",
        seconds,
    )


@pytest.mark.parametrize("at_most", [0, 1, 3])
async def test_as_many_are_admitted_as_the_limit_says_and_one_for_each_that_ends(rows: Rows, at_most: int) -> None:
    await held(rows, at_most + 4, at_most=at_most)
    assert await admitted(rows) == at_most
    assert await admitted(rows) == 0
    for left in range(min(at_most, 2), 0, -1):
        ended = await finish(rows, 1)
        assert await admitted(rows, ended if left == 1 else None) == 1
        assert await admitted(rows, ended) == 0


async def test_who_has_not_ended_gives_no_place_back(rows: Rows) -> None:
    made = await held(rows, 3, at_most=1)
    assert await admitted(rows) == 1
    assert await admitted(rows, made) == 0  # they may have ended, so they are looked at; they have not


async def test_a_rate_counts_those_that_have_ended_within_the_minute(rows: Rows) -> None:
    await held(rows, 6, per_minute=2)
    assert await admitted(rows) == 2
    ended = await finish(rows, 2)
    assert await admitted(rows, ended) == 0
    assert await admitted(rows) == 0


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(("ago", "entries"), [(50.0, 0), (60.0, 2), (-50.0, 0), (-3600.0, 2)])
async def test_a_rates_window_is_a_minute(rows: Rows, ago: float, entries: int, finished: bool) -> None:
    """Also after PostgreSQL's clock has stepped back: an admission in the future counts no longer than that."""
    await held(rows, 6, per_minute=2)
    assert await admitted(rows) == 2
    if finished:
        await finish(rows, 2)
    await aged(rows, ago)
    assert await admitted(rows) == entries


async def test_of_a_rate_as_much_is_left_as_was_not_used(rows: Rows) -> None:
    await held(rows, 1, per_minute=3)
    assert await admitted(rows) == 1
    await held(rows, 4, per_minute=3)
    assert await admitted(rows) == 2


async def test_a_place_and_an_entry_are_two_bounds(rows: Rows) -> None:
    """Who ends gives its place back at once, and its entry after a minute."""
    await held(rows, 9, at_most=2, per_minute=3)
    assert await admitted(rows) == 2
    ended = await finish(rows, 2)
    assert await admitted(rows, ended) == 1  # two places, one entry
    await aged(rows, 61)
    assert await admitted(rows) == 1  # three entries, one place


async def test_who_has_ended_takes_no_place_of_its_tenant_s_share(rows: Rows) -> None:
    """At a limit that tenants share, a tenant leaves places to others by what it has unfinished. Its entries of the
    last minute are no places.
    """
    name = (EVERYBODY, "k")
    shared = ConcurrencyLimit(*name, at_most=2, per_minute=60)
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, [jobs.NewJob(ONE, "t", limits=[shared]) for _ in range(40)])
    ended: list[UUID] = []
    for _ in range(20):
        assert len(await concurrency.admit(rows.connection, [name], ended)) == 2
        assert await concurrency.admit(rows.connection, [name]) == []
        ended = await finish(rows, 2)
    assert await rows.connection.fetchval("SELECT count(*) FROM gate_job") == 40


async def test_what_ended_at_a_rate_is_forgotten_after_the_minute_and_not_before(rows: Rows) -> None:
    await held(rows, 2, per_minute=2)
    assert await admitted(rows) == 2
    ended = await finish(rows, 2)
    count = "SELECT count(*) FROM gate_job"
    await admitted(rows, ended)
    assert await rows.connection.fetchval(count) == 2
    await aged(rows, 61)
    await admitted(rows, ended)
    assert await rows.connection.fetchval(count) == 0


async def test_a_job_that_is_deleted_within_the_minute_counts_at_a_rate_as_any_other(rows: Rows) -> None:
    """Else whoever deletes its jobs would start as many as it likes. Its rows go when the minute is over."""
    made = await held(rows, 2, per_minute=1)
    unlimited = await held(rows, 1, at_most=1, key="other")
    assert await admitted(rows) == 1
    await concurrency.admit(rows.connection, [("t", "other")])
    await finish(rows, 2)
    gone = [made[0], *unlimited]
    assert set(await jobs.delete_together(rows.connection, gone, "t")) == set(gone)
    await sweeps.forget_jobs(rows.connection, gone)
    assert await rows.connection.fetchval("SELECT array_agg(id) FROM job WHERE id = ANY($1)", gone) == made[:1]
    assert await sweeps.forgettable_jobs(rows.connection) == []
    assert await admitted(rows) == 0
    await aged(rows, 61)
    assert [job.job_id for job in await sweeps.forgettable_jobs(rows.connection)] == made[:1]
    await sweeps.forget_jobs(rows.connection, made[:1])
    assert await admitted(rows) == 1
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 1


async def test_a_limit_that_another_tenant_has_under_the_same_name_is_another(rows: Rows) -> None:
    other = [jobs.NewJob(ONE, "u", limits=[ConcurrencyLimit("u", NAME[1], 1)]) for _ in range(2)]
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, other)
    await held(rows, 2, at_most=1)
    assert await admitted(rows) == 1
    assert len(await concurrency.admit(rows.connection, [("u", NAME[1])])) == 1
    assert await admitted(rows) == 0
