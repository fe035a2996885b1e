"""Measures the costs that the simulation needs: of a task, of a statement, and of a worker without work.

A worker drains the same queue with many slots, and with few. With few slots it sends more and smaller statements.
From the difference follows the cost of a statement; the rest is the cost of a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

import asyncpg

from bench.by_hand import fill, pending, terms
from bench.processes import Meter
from bench.scale import Scale
from bench.simulation import BATCH, Costs
from bench.testbed import Installation, Testbed
from bench.throughput import Case, Run
from leasehold.db.database import connect
from leasehold.transitions import claims

#: The second drain.
FEW_SLOTS = Case("amqp", 1, {"broker": "amqp", "worker_concurrency": 8})
_IDLE_WORKERS, _IDLE_SECONDS = 4, 10.0
_LISTENERS, _NOTIFICATIONS = 50, 400
_TRIPS = 300
_RENEWALS = 200


async def calibrate(testbed: Testbed, scale: Scale, many: Run, few: Run) -> Costs:
    """The costs. `many`, `few`: drains by one worker, with all of its slots and with FEW_SLOTS."""
    worker_task, worker_statement = _split(many, few, "worker", scale.jobs)
    database_task, database_statement = _split(many, few, "postgres", scale.jobs)
    async with testbed.installation(broker="postgres") as installation:
        submission, wal_bytes = await _submission(installation, scale.jobs)
        renewal = await _renewal(installation)
        trip, flush = await _trips(installation)
        notification = await _notification(installation)
    return Costs(
        worker_task=worker_task,
        worker_statement=worker_statement,
        database_task=database_task,
        database_statement=database_statement,
        database_submission=submission,
        database_renewal=renewal,
        database_idle_worker=await _idle(testbed),
        database_notification=notification,
        broker_task=many.meter.by_role.get("rabbitmq", 0.0) / scale.jobs,
        flush_seconds=flush,
        trip_seconds=trip,
        log_bytes=wal_bytes + many.writes.wal_bytes,
    )


def _split(many: Run, few: Run, role: str, jobs: int) -> tuple[float, float]:
    """CPU seconds per task and per statement. Each drain cost tasks * a + statements * b; two drains give a and b.
    Noise must not make a cost negative.
    """
    of_many, of_few = (run.meter.by_role[role] for run in (many, few))
    sent_by_many, sent_by_few = (sum(run.statements.values()) for run in (many, few))
    statement = max(0.0, (of_few - of_many) / (sent_by_few - sent_by_many))
    return max(0.0, of_many - statement * sent_by_many) / jobs, statement


async def _submission(installation: Installation, jobs: int) -> tuple[float, float]:
    """What the submission of one job costs PostgreSQL: its CPU, and the bytes of its write-ahead log (WAL). The jobs
    come in batches like those of a busy API.
    """
    await fill(installation, BATCH)
    async with installation.connection() as connection:
        before = await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
        with Meter() as meter:
            await fill(installation, jobs)
        written = await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn") - before
    return meter.by_role["postgres"] / jobs, float(written) / jobs


async def _renewal(installation: Installation) -> float:
    """PostgreSQL's CPU for the renewal of one lease, in statements that renew a whole batch."""
    connection = await connect(installation.settings, "bench")
    try:
        lease_terms = terms()
        batch = (await pending(connection, BATCH))[0]
        leases = [claimed.lease for claimed in await claims.claim(connection, lease_terms, batch)]
        with Meter() as meter:
            for _ in range(_RENEWALS):
                await claims.renew(connection, lease_terms.owner, leases, 30)
        return meter.by_role["postgres"] / (_RENEWALS * len(leases))
    finally:
        await connection.close()


async def _trips(installation: Installation) -> tuple[float, float]:
    """Seconds of an empty statement, and of a flush of the write-ahead log."""
    async with installation.connection() as connection:
        trip = await _seconds_of(lambda: connection.execute("SELECT 1"))
        commit = await _seconds_of(lambda: connection.execute("SELECT pg_logical_emit_message(true, 'bench', 'x')"))
        return trip, max(0.0, commit - trip)


async def _seconds_of(work: Callable[[], Awaitable[object]]) -> float:
    began = monotonic()
    for _ in range(_TRIPS):
        await work()
    return (monotonic() - began) / _TRIPS


async def _notification(installation: Installation) -> float:
    """PostgreSQL's CPU for waking one listening session, without the cost of the notifying statement."""
    async with installation.connection() as connection:
        alone = await _notify(connection)
        async with AsyncExitStack() as stack:
            for _ in range(_LISTENERS):
                await stack.enter_async_context(_listening(installation))
            return max(0.0, await _notify(connection) - alone) / _LISTENERS


@asynccontextmanager
async def _listening(installation: Installation) -> AsyncIterator[None]:
    async with installation.connection() as connection:
        await connection.execute("LISTEN bench")
        yield


async def _notify(connection: asyncpg.Connection[asyncpg.Record]) -> float:
    with Meter() as meter:
        for _ in range(_NOTIFICATIONS):
            await connection.execute("NOTIFY bench")
        await asyncio.sleep(0.5)  # until the last notifications have arrived
    return meter.by_role["postgres"] / _NOTIFICATIONS


async def _idle(testbed: Testbed) -> float:
    """The cores that PostgreSQL needs for each worker without work beyond the first."""
    busy = []
    for workers in (1, 1 + _IDLE_WORKERS):
        async with testbed.installation(broker="amqp") as installation:
            for _ in range(workers):
                await installation.start_worker()
            await asyncio.sleep(3)
            with Meter() as meter:
                await asyncio.sleep(_IDLE_SECONDS)
        busy.append(meter.by_role["postgres"] / meter.seconds)
    return max(0.0, busy[1] - busy[0]) / _IDLE_WORKERS
