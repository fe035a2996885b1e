"""What the API and the console read of jobs: the tenant's own rows, and nothing of another tenant's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import pytest

from leasehold.db import event_reads, job_reads, log_reads, overview_reads, unsettled
from leasehold.db.database import Connection, connected, make_pool
from leasehold.db.job_reads import DeadLetterFilter
from leasehold.db.log_reads import LogFilter
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.settings import Settings
from leasehold.transitions import jobs, settlements
from leasehold.transitions.settlements import Completion, Failure
from tests.factories import ONE, Rows

EVERY_LETTER = DeadLetterFilter(runs=True, pipelines=(), owned=())


@dataclass(frozen=True, slots=True)
class Made:
    """Jobs of the tenant `t`: `failed` (its task is a dead letter), `running`, `held` at a limit, `done`, `deleted`
    with its tombstone, and `expired` without one.
    """

    failed: UUID
    letter: UUID
    running: UUID
    held: UUID
    done: UUID
    deleted: UUID
    expired: UUID


async def made_of(rows: Rows) -> Made:
    leased = {name: await rows.leased() for name in ("failed", "running", "done", "deleted", "expired")}
    fail = Failure(leased["failed"].lease, "error", "no_luck", "bad weather", retryable=False, delay=0)
    await settlements.fail(rows.connection, [fail])
    ended = [leased[name].lease for name in ("done", "deleted", "expired")]
    await settlements.complete(rows.connection, [Completion(lease) for lease in ended])
    ids = {name: claimed.job_id for name, claimed in leased.items()}
    await jobs.delete(rows.connection, ids["deleted"], "t")
    await rows.connection.execute(
        "UPDATE job SET expires_at = clock_timestamp() - interval '1 s' WHERE id = $1", ids["expired"]
    )
    async with rows.connection.transaction():
        await rows.submit(ONE, limits=[ConcurrencyLimit("t", "k", at_most=0)])
    held = await rows.connection.fetchval("SELECT id FROM job WHERE held")
    await rows.connection.execute("INSERT INTO tail (job_id, log_seq, stream_seq) VALUES ($1, 1, 1)", ids["running"])
    for table, columns, values in (("job_log", "lines", "'[{}]'"), ("job_stream", "chunks, restarts", "'[{}]', true")):
        await rows.connection.execute(
            f"INSERT INTO {table} (job_id, tenant_id, task_id, step, epoch, attempt, last, first, n, {columns})"
            f" SELECT job_id, 't', id, 'only', 1, 1, 1, 1, 1, {values} FROM task WHERE job_id = $1",
            ids["running"],
        )
    return Made(letter=leased["failed"].lease.task_id, held=held, **ids)


Read: TypeAlias = Callable[[Connection, str, Made], Awaitable[Any]]
READS: dict[str, Read] = {
    "a job": lambda c, tenant, made: job_reads.find_job(c, tenant, made.done),
    "jobs of a list": lambda c, tenant, made: job_reads.find_listed(
        c, tenant, [made.done, made.running], beyond_tenant=False
    ),
    "a tombstone": lambda c, tenant, made: job_reads.find_tombstone(c, tenant, made.deleted),
    "an expired job": lambda c, tenant, made: job_reads.find_tombstone(c, tenant, made.expired),
    "dead letters": lambda c, tenant, _: job_reads.dead_letters(c, tenant, EVERY_LETTER, limit=10),
    "groups of dead letters": lambda c, tenant, _: job_reads.dead_letter_groups(c, tenant, EVERY_LETTER, 10),
    "the job of a dead letter": lambda c, tenant, made: job_reads.job_of_dead_letter(c, tenant, made.letter),
    "the links of steps": lambda c, tenant, made: job_reads.step_links(c, tenant, made.done),
    "a ledger": lambda c, tenant, made: job_reads.ledger(c, tenant, made.done),
    "the reasons of a step": lambda c, tenant, made: job_reads.why_waiting(c, tenant, made.running),
    "the reasons of a limit": lambda c, tenant, made: job_reads.why_held(c, tenant, made.held),
    "events": lambda c, tenant, made: event_reads.events_after(c, tenant, made.failed, 0, 10),
    "log lines": lambda c, tenant, made: log_reads.log_page(c, tenant, made.running, 0, LogFilter(), 10),
    "the last log lines": lambda c, tenant, made: log_reads.log_end(c, tenant, made.running, 10),
    "a stream": lambda c, tenant, made: log_reads.stream_page(c, tenant, made.running, 0, LogFilter(), 10),
    "the end of a stream": lambda c, tenant, made: log_reads.stream_end(c, tenant, made.running, 10),
}


@pytest.mark.parametrize("read", READS)
async def test_a_read_answers_its_own_tenant_and_no_other(rows: Rows, read: str) -> None:
    made = await made_of(rows)
    assert await READS[read](rows.connection, "t", made)
    assert not await READS[read](rows.connection, "another", made)


async def test_an_operator_reads_the_jobs_of_all_tenants(rows: Rows) -> None:
    made = await made_of(rows)
    assert await job_reads.find_job(rows.connection, None, made.done)
    listed = await job_reads.find_listed(rows.connection, None, [made.done, made.running], beyond_tenant=True)
    assert len(listed) == 2
    assert await job_reads.find_tombstone(rows.connection, None, made.deleted)
    assert await job_reads.find_tombstone(rows.connection, None, made.expired)
    assert await job_reads.job_of_dead_letter(rows.connection, None, made.letter) == made.failed


async def test_a_job_past_its_retention_is_found_as_a_tombstone_alone(rows: Rows) -> None:
    """Retention may delete its objects at any moment."""
    made = await made_of(rows)
    gone = [made.deleted, made.expired]
    assert [await job_reads.find_job(rows.connection, "t", job_id) for job_id in gone] == [None, None]
    assert await job_reads.find_listed(rows.connection, "t", gone, beyond_tenant=True) == []
    stones = [await job_reads.find_tombstone(rows.connection, "t", job_id) for job_id in gone]
    assert [stone["because"] for stone in stones if stone is not None] == ["deleted", "expired"]
    assert await job_reads.find_tombstone(rows.connection, "t", made.done) is None
    await rows.connection.execute("UPDATE job SET expires_at = clock_timestamp() WHERE id = $1", made.failed)
    assert await job_reads.dead_letters(rows.connection, "t", EVERY_LETTER, limit=10) == []
    assert await job_reads.dead_letter_groups(rows.connection, "t", EVERY_LETTER, 10) == []


async def test_a_failed_step_that_a_workflow_handles_is_no_dead_letter(rows: Rows) -> None:
    made = await made_of(rows)
    await rows.connection.execute("UPDATE task SET contained = true WHERE id = $1", made.letter)
    assert await job_reads.dead_letters(rows.connection, "t", EVERY_LETTER, limit=10) == []
    assert await job_reads.job_of_dead_letter(rows.connection, "t", made.letter) is None
    running = await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1", made.running)
    assert await job_reads.job_of_dead_letter(rows.connection, "t", running) is None


async def test_dead_letters_since_a_moment_are_those_that_failed_later(rows: Rows) -> None:
    made = await made_of(rows)
    at = await rows.connection.fetchval("SELECT finished_at FROM task WHERE id = $1", made.letter)
    for since, found in ((at - timedelta(microseconds=1), [made.letter]), (at, [])):
        letters = await job_reads.dead_letters(rows.connection, "t", EVERY_LETTER, since=since, limit=10)
        assert [letter["task_id"] for letter in letters] == found


async def test_the_counts_of_a_tenant_count_no_other_tenants_jobs(rows: Rows) -> None:
    made = await made_of(rows)
    await rows.connection.execute("UPDATE job SET external = 1 WHERE id = $1", made.running)
    await rows.connection.execute(
        "UPDATE task SET queue = 'ext:t:q', lease_until = clock_timestamp() - interval '1 hour' WHERE job_id = $1",
        made.running,
    )
    counts = {
        tenant: (
            (await overview_reads.unfinished_counts(rows.connection, tenant, timedelta(minutes=1)))["unfinished"],
            await overview_reads.silent_steps(rows.connection, tenant, 60.0),
            len((await unsettled.silent_steps(rows.connection, tenant, 60.0, None, 10))[0]),
        )
        for tenant in ("t", "another")
    }
    assert counts == {"t": (2, 1, 1), "another": (0, 0, 0)}


async def test_the_instants_of_a_jobs_steps_are_utc_whatever_the_zone_of_postgresql(
    settings: Settings, rows: Rows
) -> None:
    """PostgreSQL writes them as text, in the zone of the session."""
    job_id = (await rows.leased()).job_id
    name = await rows.connection.fetchval("SELECT current_database()")
    await rows.connection.execute(f"ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'")
    async with connected(settings, "test") as alone, make_pool(settings, "test", 1) as pool, pool.acquire() as lent:
        for connection in (alone, lent):
            job = await job_reads.find_job(connection, "t", job_id)
            assert job is not None
            assert job["steps"][0]["started_at"].endswith("+00:00")
