"""How fast retention deletes expired jobs: by batches, and by what it asks the store at once; not by a clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any, cast

import pytest

from leasehold.db.database import Connection, Pool, make_pool
from leasehold.domain.errors import StoreError, StoreUnavailable
from leasehold.pipelines import SHIPPED
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import jobs, sweeps
from leasehold.worker.maintenance import housekeeping as housekeepers
from leasehold.worker.maintenance.housekeeping import NEXT_BATCH_SECONDS, Housekeeping
from tests.factories import ONE, Rows


class SlowStore:
    """A store that takes a while for each LIST, and then has no objects. `most`: the most requests that it had at once.
    `is_away`: it answers nothing. `is_refusing`: it refuses.
    """

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.prefixes: list[str] = []
        self.deleted: list[str] = []
        self.running = self.most = 0
        self.is_away = self.is_refusing = False

    async def list(self, prefix: str) -> AsyncIterator[Any]:
        self.prefixes.append(prefix)
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(5):
            await asyncio.sleep(0)
        self.running -= 1
        if self.is_away:
            raise StoreUnavailable(prefix)
        if self.is_refusing:
            raise StoreError(prefix)
        for stored in self.objects:
            yield stored

    async def delete(self, *keys: str) -> None:
        self.deleted += keys

    async def head(self, key: str) -> None:
        if self.is_away:
            raise StoreUnavailable(key)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with make_pool(settings, "test", 1) as pool:
        yield pool


@pytest.fixture
def housekeeping(settings: Settings, pool: Pool, store: SlowStore) -> Housekeeping:
    return Housekeeping(settings, pool.acquire, cast("ObjectStore", store), SHIPPED)


async def expired(rows: Rows, count: int, *, seconds_apart: int = 0) -> None:
    """Jobs that have expired at once, or one after another."""
    connection = rows.connection
    await rows.submit(ONE, count=count)
    job_ids = [row["id"] for row in await connection.fetch("SELECT id FROM job WHERE finished_at IS NULL")]
    await jobs.request_cancel(connection, job_ids, "t", reason="", by="test")
    await connection.execute(
        "UPDATE job SET expires_at = statement_timestamp() - interval '1 day' + n * make_interval(secs => $1)"
        " FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM job) AS numbered WHERE numbered.id = job.id",
        seconds_apart,
    )


async def test_while_the_store_refuses_each_job_retention_pauses(
    rows: Rows, housekeeping: Housekeeping, store: SlowStore
) -> None:
    await expired(rows, 100)
    store.is_refusing = True
    assert await housekeeping.retention() is None
    assert await rows.connection.fetchval("SELECT count(*) FROM quarantine") == 100


async def test_retention_goes_on_at_once_while_batches_are_full_and_asks_the_store_about_many_jobs_at_once(
    rows: Rows, housekeeping: Housekeeping, store: SlowStore
) -> None:
    await expired(rows, 250)
    assert [await housekeeping.retention() for _ in range(4)] == [0.0, 0.0, NEXT_BATCH_SECONDS, None]
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 0
    assert len(store.prefixes) == len(set(store.prefixes)) == 250
    assert store.most == 20  # the worker's attempts use the same connections


async def test_a_store_that_goes_away_is_asked_about_no_further_jobs(
    rows: Rows, housekeeping: Housekeeping, store: SlowStore
) -> None:
    await expired(rows, 100)
    store.is_away = True
    with pytest.raises(StoreUnavailable):
        await housekeeping.retention()
    assert len(store.prefixes) == 20
    assert await rows.connection.fetchval("SELECT count(*) FROM job") == 100
    assert await rows.connection.fetchval("SELECT count(*) FROM quarantine") == 0


async def test_jobs_that_must_stay_are_not_read_again_for_each_batch_of_those_that_expired_later(
    rows: Rows, housekeeping: Housekeeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a tenant that has moved to another cell. Once in a while they are: perhaps they may go."""
    monkeypatch.setattr(housekeepers, "_BATCH", 2)
    monkeypatch.setattr(housekeepers, "_BATCHES_IN_A_PASS", 3)
    await expired(rows, 11, seconds_apart=1)
    in_order = await rows.connection.fetch("SELECT id, expires_at FROM job ORDER BY expires_at")
    await rows.connection.execute("UPDATE job SET tenant_id = 'moved' WHERE id = $1", in_order[0]["id"])
    await rows.connection.execute(
        "INSERT INTO tenant_move (tenant_id, from_cell, to_cell, direction, stage)"
        " VALUES ('moved', 'a', 'b', 'out', 'moved')"
    )
    read_from: list[datetime | None] = []
    forgettable_jobs = sweeps.forgettable_jobs

    async def reading(connection: Connection, *, since: datetime | None, limit: int) -> list[sweeps.Forgettable]:
        read_from.append(since)
        return await forgettable_jobs(connection, since=since, limit=limit)

    monkeypatch.setattr(sweeps, "forgettable_jobs", reading)
    while await housekeeping.retention() is not None:
        continue
    times = [row["expires_at"] for row in in_order]
    assert read_from == [None, times[2], times[4], None, times[8], times[10]]
    assert [row["id"] for row in await rows.connection.fetch("SELECT id FROM job")] == [in_order[0]["id"]]
    read_from.clear()
    await housekeeping.retention()
    assert read_from == [None]
