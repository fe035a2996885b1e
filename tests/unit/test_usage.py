"""A tenant's unfinished jobs and stored bytes: which number of them is accepted, and when PostgreSQL counts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from leasehold.domain.errors import Invalid, TooMany
from leasehold.limits import usage as usages
from leasehold.limits.usage import Usage
from leasehold.settings import Settings
from tests.support.clock import Clock

#: With this bound, a process decides by the counts that it remembers, up to 16,000 jobs.
BOUND, FAR = 20_000, 16_000
SETTINGS = Settings(_env_file=None)


class Database:
    """Stands for PostgreSQL, where each tenant has so many jobs and bytes. `job_counts`, `byte_counts`: the tenants for
    whom it has counted them. `may_answer`: it answers once this is set.
    """

    def __init__(self, jobs: int = 0, stored_bytes: int = 0) -> None:
        self.jobs, self.stored_bytes = jobs, stored_bytes
        self.job_counts: list[str] = []
        self.byte_counts: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        yield self

    async def fetchval(self, _query: str, tenant: str, *at_most: int) -> int:
        (self.job_counts if at_most else self.byte_counts).append(tenant)
        counted = min(self.jobs, *at_most) if at_most else self.stored_bytes
        await self.may_answer.wait()
        return counted

    async def fetchrow(self, _query: str, _tenant: str) -> dict[str, int]:
        return {}

    async def execute(self, query: str, *_arguments: str) -> None:
        """Takes any lock at once."""


@pytest.fixture(autouse=True)
def stopped_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(usages, "monotonic", clock)
    return clock


def limited(jobs: int = 0, stored_bytes: int = 0) -> Usage:
    bounds = {"unfinished_per_tenant": jobs, "stored_bytes_per_tenant": stored_bytes}
    return Usage(SETTINGS.model_copy(update=bounds), [])


async def reserve(usage: Usage, database: Any, count: int, size: int = 0, tenant: str = "t") -> bool:
    return await usage.reserve(database, tenant, count, size)


async def refused(usage: Usage, database: Any, count: int, size: int = 0) -> tuple[str, float | None]:
    """The code, and when to come again."""
    with pytest.raises(TooMany) as error:
        await reserve(usage, database, count, size)
    return error.value.code, error.value.retry_after


async def has_room_for(usage: Usage, database: Any, count: int) -> bool:
    """Whether the process, by what it remembers, admits so many jobs, and no job more. It remembers them."""
    return await reserve(usage, database, count) and not await reserve(usage, database, 1)


# --- the bounds


async def test_without_a_bound_nothing_is_counted_and_everything_is_accepted() -> None:
    database = Database(10**9, 10**15)
    usage = limited()
    assert await reserve(usage, database, 10**6, 10**12)
    await usage.check_exactly(database, "t")  # type: ignore[arg-type]  # stands for a connection
    assert (database.job_counts, database.byte_counts) == ([], [])


async def test_each_bound_holds_without_the_other() -> None:
    assert await reserve(limited(jobs=BOUND), Database(stored_bytes=10**15), 1, 10**12)
    assert await refused(limited(jobs=BOUND), Database(BOUND), 1) == ("too_many_unfinished", 5.0)
    assert await reserve(limited(stored_bytes=10), Database(10**9), 10**6, 10)
    assert await refused(limited(stored_bytes=10), Database(stored_bytes=10), 1) == ("storage_full", 3600.0)


@pytest.mark.parametrize("bound", [2, 10_000, BOUND])
async def test_the_last_jobs_up_to_the_bound_are_accepted_and_checked_exactly(bound: int) -> None:
    assert not await reserve(limited(jobs=bound), Database(), bound)
    assert not await reserve(limited(jobs=bound), Database(bound - 1), 1)
    assert await refused(limited(jobs=bound), Database(bound - 1), 2) == ("too_many_unfinished", 5.0)
    with pytest.raises(Invalid) as for_ever:
        await reserve(limited(jobs=bound), Database(), bound + 1)
    assert for_ever.value.code == "batch_too_large"


async def test_the_check_after_the_write_passes_at_the_bound_and_not_above_it() -> None:
    database: Any = Database(10)
    await limited(jobs=10).check_exactly(database, "t")
    database.jobs = 11
    with pytest.raises(TooMany) as error:
        await limited(jobs=10).check_exactly(database, "t")
    assert error.value.code == "too_many_unfinished"


async def test_bytes_are_accepted_up_to_the_bound_and_nothing_is_once_it_is_reached() -> None:
    """Even jobs without inputs write outputs."""
    usage, database = limited(stored_bytes=1000), Database(stored_bytes=400)
    assert await refused(usage, database, 1, 601) == ("storage_full", 3600.0)
    assert await reserve(usage, database, 1, 600)
    assert await refused(usage, database, 1, 0) == ("storage_full", 3600.0)
    assert await reserve(limited(stored_bytes=1000), Database(), 1, 1000)
    with pytest.raises(Invalid) as for_ever:
        await reserve(limited(stored_bytes=1000), Database(), 1, 1001)
    assert for_ever.value.code == "batch_too_large"


async def test_a_job_that_names_no_bytes_brings_none() -> None:
    usage, database = limited(stored_bytes=10), Database(stored_bytes=9)
    for _ in range(3):
        assert await usage.reserve(database, "t", 1)
    assert await reserve(usage, database, 1, 1)


async def test_a_submission_that_is_refused_for_its_bytes_takes_no_place_of_a_job() -> None:
    usage, database = limited(BOUND, 1000), Database(stored_bytes=500)
    for _ in range(3):
        await refused(usage, database, FAR, 501)
    assert await has_room_for(usage, database, FAR)


async def test_of_two_submissions_that_both_saw_room_for_their_bytes_one_is_refused() -> None:
    """They waited for the count of their jobs."""
    usage, database = limited(10, 1000), Database()
    await reserve(usage, database, 1)
    database.may_answer.clear()
    both = [asyncio.create_task(reserve(usage, database, 1, 600)) for _ in range(2)]
    while len(database.job_counts) < 4:  # the first submission counted twice
        await asyncio.sleep(0)
    database.may_answer.set()
    first, second = await asyncio.gather(*both, return_exceptions=True)
    assert (first, getattr(second, "code", None)) == (False, "storage_full")


# --- what a process remembers


async def test_a_count_is_used_until_its_pause_is_over_and_then_made_anew(stopped_clock: Clock) -> None:
    usage, database = limited(BOUND, 1000), Database(1, 1)
    await reserve(usage, database, 1, 1)
    stopped_clock.now += 0.99 * usages._LEAST_PAUSE
    await reserve(usage, database, 1, 1)
    assert (database.job_counts, database.byte_counts) == (["t"], ["t"])
    stopped_clock.now = 1000.0 + usages._LEAST_PAUSE
    database.jobs, database.stored_bytes = FAR, 1000
    assert await refused(usage, database, 1) == ("storage_full", 3600.0)
    stopped_clock.now += usages._LONGEST_PAUSE
    database.stored_bytes = 0
    assert not await reserve(usage, database, 1), "near the bound, the jobs are counted exactly"


@pytest.mark.parametrize("counted", [0, 5000])
async def test_far_from_its_bound_a_tenant_has_the_jobs_that_were_counted_and_those_admitted_since(
    counted: int,
) -> None:
    usage, database = limited(jobs=BOUND), Database(counted)
    assert await reserve(usage, database, 1000)
    assert await reserve(usage, database, 2000)
    assert await has_room_for(usage, database, FAR - 3000 - counted)


@pytest.mark.parametrize(("bound", "is_far"), [(10_000, False), (10_001, True)])
async def test_a_small_bound_is_checked_exactly_at_each_submission(bound: int, is_far: bool) -> None:
    assert await reserve(limited(jobs=bound), Database(), 1) is is_far


async def test_jobs_of_the_last_moments_count_beside_a_new_count_which_may_lack_them(stopped_clock: Clock) -> None:
    """Their transactions may not have been committed when PostgreSQL counted."""
    usage, database = limited(jobs=BOUND), Database()
    assert await reserve(usage, database, 1000)
    stopped_clock.now += 0.95 * usages._COMMIT_SECONDS
    assert await reserve(usage, database, 2000)
    stopped_clock.now += 0.95 * usages._COMMIT_SECONDS
    database.jobs = 100
    assert await has_room_for(usage, database, FAR - 3000 - 100)


async def test_jobs_of_the_last_moments_count_also_where_the_pause_between_two_counts_is_long(
    stopped_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usages, "_LEAST_PAUSE", 2.7 * usages._COMMIT_SECONDS)
    usage, database = limited(jobs=BOUND), Database()
    assert await reserve(usage, database, 1000)
    stopped_clock.now += 2.5 * usages._COMMIT_SECONDS
    assert await reserve(usage, database, 2000)
    stopped_clock.now += 0.3 * usages._COMMIT_SECONDS
    database.jobs = 1000
    assert await has_room_for(usage, database, FAR - 2000 - 1000)


async def test_jobs_that_were_admitted_at_different_moments_of_a_period_all_count(stopped_clock: Clock) -> None:
    usage, database = limited(jobs=BOUND), Database()
    for count in (1000, 2000, 4000):
        assert await reserve(usage, database, count)
        stopped_clock.now += 0.3 * usages._COMMIT_SECONDS
    assert await has_room_for(usage, database, FAR - 7000)


@pytest.mark.parametrize("moments", [1, 3])
async def test_jobs_that_are_committed_by_now_count_once(stopped_clock: Clock, moments: int) -> None:
    """`moments`: at how many of them PostgreSQL counts."""
    usage, database = limited(jobs=BOUND), Database()
    assert await reserve(usage, database, 3000)
    for _ in range(moments):
        stopped_clock.now += 2 * usages._COMMIT_SECONDS
        database.jobs = 3000
        assert await reserve(usage, database, 0)
    assert await has_room_for(usage, database, FAR - 3000)


async def test_what_is_admitted_while_postgresql_counts_is_added_to_its_count(stopped_clock: Clock) -> None:
    usage, database = limited(BOUND, 1000), Database()
    assert await reserve(usage, database, 4000, 100)
    stopped_clock.now += usages._LONGEST_PAUSE
    database.jobs, database.stored_bytes = 4000, 100
    database.may_answer.clear()
    counting = asyncio.create_task(reserve(usage, database, 0))
    while len(database.job_counts) < 2:
        await asyncio.sleep(0)
    assert await reserve(usage, database, 2000, 300)
    database.may_answer.set()
    assert await counting
    assert await refused(usage, database, 0, 601) == ("storage_full", 3600.0)
    assert await reserve(usage, database, 0, 599)
    assert await has_room_for(usage, database, FAR - 6000)


async def test_of_too_many_tenants_the_one_that_submitted_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usages, "_MAX_TENANTS", 2)
    usage, database = limited(jobs=BOUND), Database()
    for tenant in "abab":
        await reserve(usage, database, 1, tenant=tenant)
    assert database.job_counts == ["a", "b"]
    for tenant in "aca":
        await reserve(usage, database, 1, tenant=tenant)
    assert database.job_counts == ["a", "b", "c"]
    await reserve(usage, database, 1, tenant="b")
    assert database.job_counts == ["a", "b", "c", "b"]


# --- what a tenant has


@pytest.mark.parametrize(("bound", "counted"), [(0, 1_000_000), (BOUND, BOUND)])
async def test_unfinished_jobs_are_counted_up_to_the_tenant_s_bound_or_to_a_million(bound: int, counted: int) -> None:
    database: Any = Database(2_000_000, 700)
    assert await limited(bound, 1000).measure(database, "t") == {
        "unfinished_jobs": counted,
        "max_unfinished_jobs": bound,
        "stored_bytes": 700,
        "max_stored_bytes": 1000,
    }
