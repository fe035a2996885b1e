"""`migrations`: for how long a migration from the first release to this code blocks writers, beside many jobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

import asyncpg

from bench.figure import Figure, Goal
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.db.database import migrate
from leasehold.db.schemas import CORE
from leasehold.db.upgrading.plan import PlannedRevision, PlannedStatement, plan_of

#: The newest revision of the release that is out.
_RELEASED = "0018_uploads_of_attempts"
_GOAL = Goal(1.0)

_INDEXES = """
SELECT indexrelid::regclass::text AS name, pg_get_indexdef(indexrelid) AS definition
FROM pg_index WHERE indrelid IN ('job'::regclass, 'task'::regclass, 'run'::regclass)
AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)
"""
# $1: how many jobs. One in a thousand jobs has not ended.
_FILL = (
    """
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq, params, inputs,
                     output_prefix, created_at, started_at, finished_at)
    SELECT ('01900000' || lpad(to_hex(g), 24, '0'))::uuid, 'acme', 'report', 1,
           CASE WHEN g % 1000 = 0 THEN 'running' ELSE 'succeeded' END, (g % 1000 = 0)::int, 1,
           jsonb_build_object('n', g), '{}', 'jobs/' || g, now(), now(), CASE WHEN g % 1000 <> 0 THEN now() END
    FROM generate_series(1, $1::int) AS g
    """,
    """
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, finished_at)
    SELECT ('01900000' || lpad(to_hex(g), 24, '0'))::uuid, ('01900000' || lpad(to_hex(g), 24, '0'))::uuid, 'acme',
           'only', 0, 'media', 1, CASE WHEN g % 1000 = 0 THEN 'pending' ELSE 'succeeded' END, 1,
           CASE WHEN g % 1000 <> 0 THEN now() END
    FROM generate_series(1, $1::int) AS g
    """,
    """
    INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id)
    SELECT ('01900000' || lpad(to_hex(g), 24, '0'))::uuid, 'acme', 'report', 1, 'tenant', ''
    FROM generate_series(1, $1::int) AS g
    """,
)
#: The writes of a writer during the migration: a row of each table that every job writes gets the value that it has.
_WRITTEN = (("job", "id", "event_seq"), ("task", "id", "priority"), ("run", "job_id", "scope_id"))
_WRITE = tuple(f"UPDATE {table} SET {column} = {column} WHERE {key} = $1" for table, key, column in _WRITTEN)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    jobs = max(scale.finished)
    load, runs, details = [], [], []
    for _ in range(scale.runs):
        async with testbed.installation(broker="postgres") as installation:
            await _fill(installation, jobs)
            await testbed.checkpoint()
            load.append(os.getloadavg()[0])
            *times, worst = await _migrate(installation)
            runs.append(times)
            details.append(worst)
    held, waited, whole = (tuple(run[place] for run in runs) for place in range(3))
    beside = f"of a migration from 0.1.0 beside {jobs:,} jobs"
    return [
        Figure(f"the longest lock that stops writers {beside}", "s", held, tuple(load), _GOAL, {"in": details}),
        Figure(f"the longest wait of a writer {beside}", "s", waited, tuple(load), _GOAL),
        Figure(f"the time {beside}", "s", whole, tuple(load)),
    ]


async def _migrate(installation: Installation) -> tuple[float, float, float, str]:
    """Migrate. Returns the longest lock that stops writers, the longest wait of a writer, the whole time, and the
    revision with the longest lock.
    """
    async with installation.connection() as connection:
        planned = (await plan_of(connection, [CORE])).revisions
        writing, began = asyncio.create_task(_write(installation)), perf_counter()
        held = {revision.revision: await _apply(connection, revision) for revision in planned}
        seconds = perf_counter() - began
        writing.cancel()
    worst = max(held, key=lambda name: held[name])
    return held[worst], await writing, seconds, worst


async def _fill(installation: Installation, jobs: int) -> None:
    """Make the release's schema, and `jobs` jobs of a step each in it. Indexes are built after the rows."""
    async with installation.connection() as connection:
        await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        await migrate(installation.url, _RELEASED)
        await connection.execute(
            "SET session_replication_role = replica"
        )  # no check of references, which are all right
        indexes = await connection.fetch(_INDEXES)
        for index in indexes:
            await connection.execute(f"DROP INDEX {index['name']}")
        for statement in _FILL:
            await connection.execute(statement.replace("$1", str(jobs)))
        for index in indexes:
            await connection.execute(index["definition"])
        await connection.execute("VACUUM ANALYZE job, task, run")


async def _apply(connection: asyncpg.Connection[asyncpg.Record], revision: PlannedRevision) -> float:
    """Run the revision. Returns for how long it held a lock that stops writers: from its statement to the commit."""
    longest = 0.0
    for transaction in revision.transactions:
        if any(" CONCURRENTLY " in step.statement for step in transaction):  # each has transactions of its own
            for step in transaction:
                longest = max(longest, await _run(connection, (step,)))
        else:
            async with connection.transaction():
                held = await _run(connection, transaction)
            longest = max(longest, held)
    return longest


async def _run(connection: asyncpg.Connection[asyncpg.Record], steps: Sequence[PlannedStatement]) -> float:
    since = None
    for step in steps:
        if since is None and any(lock.stops for lock in step.effect.locks):
            since = perf_counter()
        await connection.execute(step.statement)
    return perf_counter() - since if since is not None else 0.0


async def _write(installation: Installation) -> float:
    """Write a row of each table again and again, until cancelled. Returns the longest time of one write."""
    longest = 0.0
    async with installation.connection() as connection:
        ids = [row["id"] for row in await connection.fetch("SELECT id FROM job LIMIT 100")]
        with suppress(asyncio.CancelledError):
            while True:
                for job in ids:
                    for statement in _WRITE:
                        began = perf_counter()
                        await connection.execute(statement, job)
                        longest = max(longest, perf_counter() - began)
                    await asyncio.sleep(0.01)
    return longest
