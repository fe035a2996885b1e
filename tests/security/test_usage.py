"""A tenant's unfinished jobs and stored bytes stay within their bounds however many submissions come at once, and a
process counts them once for all that wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import asyncpg
import pytest

from leasehold.db.database import Connection, Pool, connect, make_pool
from leasehold.domain.errors import Invalid, TooMany
from leasehold.limits import upload_room
from leasehold.limits import usage as usages
from leasehold.limits.upload_room import UploadRoom
from leasehold.limits.usage import Usage
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.jobs import NewJob
from tests.factories import ONE
from tests.support.lock_waits import until_waiting

BOUND, BATCH, AT_ONCE = 2000, 100, 20
LIMITED = {"unfinished_per_tenant": BOUND, "stored_bytes_per_tenant": 0}
STORING = {"unfinished_per_tenant": 0, "stored_bytes_per_tenant": 1000}


@pytest.fixture(autouse=True)
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a bound of more than 10,000 jobs."""
    monkeypatch.setattr(usages, "_ALWAYS_EXACT_JOBS", 0)


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Connection]:
    connection = await connect(settings, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    patient = settings.model_copy(update={"database_timeout": 60.0})  # a burst waits for one lock
    pool = await make_pool(patient, "test", AT_ONCE)
    yield pool
    pool.terminate()


def limited(settings: Settings, bounds: dict[str, int], stored: str | None = None) -> Usage:
    return Usage(settings.model_copy(update=bounds), [] if stored is None else [stored])


@pytest.mark.parametrize("pause", [0.0, 60.0])
async def test_no_burst_of_batches_passes_the_bound_on_unfinished_jobs(
    settings: Settings, pool: Pool, rows: Connection, pause: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pause`: whether counts are used again at all."""
    monkeypatch.setattr(usages, "_LEAST_PAUSE", pause)
    usage = limited(settings, LIMITED)

    async def submit() -> None:
        async with pool.acquire() as connection, connection.transaction():
            is_far = await usage.reserve(connection, "acme", BATCH)
            await jobs.submit(connection, [NewJob(ONE, "acme") for _ in range(BATCH)])
            if not is_far:
                await usage.check_exactly(connection, "acme")

    answers = await asyncio.gather(*(submit() for _ in range(2 * BOUND // BATCH)), return_exceptions=True)
    assert {type(answer) for answer in answers} <= {type(None), TooMany}
    assert await rows.fetchval("SELECT count(*) FROM job") == BOUND


async def test_one_of_many_submissions_counts_for_all(
    settings: Settings, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    usage = limited(settings, LIMITED)

    def note(query: asyncpg.connection.LoggedQuery) -> None:
        if "FROM job WHERE tenant_id" in query.query:
            counts.append(query.query)

    async def reserve(both: asyncio.Barrier) -> None:
        async with pool.acquire() as connection:
            with connection.query_logger(note):
                await both.wait()
                await usage.reserve(connection, "acme", 1)

    both = asyncio.Barrier(AT_ONCE)
    monkeypatch.setattr(usages, "_LONGEST_PAUSE", 0.0)
    await asyncio.gather(*(reserve(both) for _ in range(AT_ONCE)))  # the first count of the process: nobody has one
    monkeypatch.setattr(usages, "_LEAST_PAUSE", 60.0)
    counts.clear()
    await asyncio.gather(*(reserve(both) for _ in range(AT_ONCE)))
    assert len(counts) == 1


async def test_bytes_that_are_admitted_while_another_counts_are_not_forgotten(settings: Settings, pool: Pool) -> None:
    usage = limited(settings, STORING, "SELECT 0 FROM pg_sleep(0.2)")
    first = asyncio.create_task(usage.reserve(pool, "acme", 0, 600))
    second = asyncio.create_task(usage.reserve(pool, "acme", 0, 600))
    answers = await asyncio.gather(first, second, return_exceptions=True)
    assert sorted(map(type, answers), key=str) == sorted([bool, TooMany], key=str)


async def test_jobs_that_are_admitted_while_another_counts_are_not_forgotten_however_long_it_counts(
    settings: Settings, pool: Pool, rows: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(usages, "monotonic", lambda: now)
    usage = limited(settings, LIMITED)
    assert await usage.reserve(pool, "acme", 1)
    now += usages._LONGEST_PAUSE + 1
    async with rows.transaction():
        await rows.execute("LOCK TABLE job IN ACCESS EXCLUSIVE MODE")
        counting = asyncio.create_task(usage.reserve(pool, "acme", 0))
        await until_waiting(rows)
        assert await usage.reserve(pool, "acme", BOUND // 2)
        now += 10 * usages._COMMIT_SECONDS
    assert await counting
    assert not await usage.reserve(pool, "acme", BOUND // 2 - 1), "it counts again only near the bound"


async def test_a_refused_submission_keeps_no_bytes(settings: Settings, pool: Pool) -> None:
    usage = limited(settings, {"unfinished_per_tenant": 5, "stored_bytes_per_tenant": 1000})
    for _ in range(3):
        with pytest.raises(Invalid):
            await usage.reserve(pool, "acme", 6, 600)
    await usage.reserve(pool, "acme", 1, 600)


async def test_what_can_never_be_stored_is_invalid_and_not_too_many(settings: Settings, pool: Pool) -> None:
    with pytest.raises(Invalid, match="1001 bytes exceed the 1000"):
        await limited(settings, STORING).reserve(pool, str(uuid4()), 0, 1001)


async def test_uploads_that_begin_together_share_the_room_that_one_of_them_counted(pool: Pool) -> None:
    """Each counts at first: what the faster one has reserved is not forgotten by the slower one's count."""
    mebibyte = 1024 * 1024
    room = UploadRoom(8 * mebibyte)  # a quarter of it is far from the bound

    async def reserve() -> bool:
        async with pool.acquire() as connection:
            return await room.reserve(connection, "acme", mebibyte * 3 // 2)

    assert sorted(await asyncio.gather(reserve(), reserve())) == [False, True]


async def test_an_exact_count_is_remembered_where_no_count_is(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the lock may be longer than a count is fresh. A count meanwhile does not see what is not committed."""
    monkeypatch.setattr(upload_room, "FRESH_SECONDS", 3600.0)
    mebibyte = 1024 * 1024
    room = UploadRoom(8 * mebibyte)
    async with pool.acquire() as connection:
        room.add_exactly("acme", mebibyte, mebibyte // 2)
        assert await room.reserve(connection, "acme", mebibyte // 2)
        assert not await room.reserve(connection, "acme", 1)


@pytest.mark.parametrize(("remembered", "exactly"), [(3, 0), (0, 3)])
async def test_of_a_remembered_and_an_exact_count_the_larger_one_counts_on(
    pool: Pool, remembered: int, exactly: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remembered one lacks what other processes have admitted, and the exact one what is not committed yet."""
    monkeypatch.setattr(upload_room, "FRESH_SECONDS", 3600.0)
    half = 512 * 1024
    room = UploadRoom(16 * half)
    async with pool.acquire() as connection:
        assert await room.reserve(connection, "acme", remembered * half)
        room.add_exactly("acme", exactly * half, half)
        assert await room.reserve(connection, "acme", 0)
        assert not await room.reserve(connection, "acme", 1)
