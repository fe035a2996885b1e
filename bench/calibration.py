"""Measures what the simulation needs: the costs of a task, of a statement, and of a worker without work.

A worker drains the same queue twice, with many slots and with few. With few, its statements are smaller, so there are
more of them. The difference is what statements cost; the rest is what tasks cost.
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
from bench.throughput import Case, Run, drain
from leasehold.db.database import connect
from leasehold.transitions import claims

#: Slots of the worker in the second drain.
_FEW = 8
_IDLE_WORKERS, _IDLE_SECONDS = 4, 10.0
_LISTENERS, _NOTIFICATIONS = 50, 400
_TRIPS = 300
_RENEWALS = 200


async def calibrate(testbed: Testbed, scale: Scale) -> tuple[Costs, Run]:
    """The costs, and the run of one worker that they come from."""
    many = await drain_thrice(testbed, scale, Case("amqp", 1, {"broker": "amqp"}))
    few = await drain_thrice(testbed, scale, Case("amqp", 1, {"broker": "amqp", "worker_concurrency": _FEW}))
    worker_task, worker_statement = _split(many, few, "worker", scale.jobs)
    database_task, database_statement = _split(many, few, "postgres", scale.jobs)
    async with testbed.installation(broker="postgres") as installation:
        submission, log_bytes = await _submission(installation, scale.jobs)
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
        log_bytes=log_bytes + many.writes.wal_bytes,
    ), many


async def drain_thrice(testbed: Testbed, scale: Scale, case: Case) -> Run:
    """The drain of the middle rate among three."""
    runs = [await drain(testbed, scale, case) for _ in range(3)]
    return sorted(runs, key=lambda run: run.rate)[1]


def _split(many: Run, few: Run, role: str, jobs: int) -> tuple[float, float]:
    """Seconds of a task and of a statement: the line through both drains. Noise must not make a cost negative."""
    of_many, of_few = (run.meter.by_role[role] / jobs for run in (many, few))
    statement = max(0.0, (of_few - of_many) / (few.writes.commits - many.writes.commits))
    return max(0.0, of_many - statement * many.writes.commits), statement


async def _submission(installation: Installation, jobs: int) -> tuple[float, float]:
    """PostgreSQL's CPU of a submission, in batches as an API that is busy writes them; and bytes of the log."""
    await fill(installation, BATCH)
    async with installation.connection() as connection:
        before = await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")
        with Meter() as meter:
            await fill(installation, jobs)
        written = await connection.fetchval("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn") - before
    return meter.by_role["postgres"] / jobs, float(written) / jobs


async def _renewal(installation: Installation) -> float:
    connection = await connect(installation.settings, "bench")
    try:
        owner = terms()
        for batch in (await pending(connection, BATCH))[:8]:
            leases = [claimed.lease for claimed in await claims.claim(connection, owner, batch)]
        with Meter() as meter:
            for _ in range(_RENEWALS):
                await claims.renew(connection, owner.owner, leases, 30)
        return meter.by_role["postgres"] / (_RENEWALS * len(leases))
    finally:
        await connection.close()


async def _trips(installation: Installation) -> tuple[float, float]:
    """Seconds of an empty statement, and of a flush of the log."""
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
    """PostgreSQL's CPU to wake one session that listens, beside what the notifying statement costs."""
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
        await asyncio.sleep(0.5)  # the last are on their way
    return meter.by_role["postgres"] / _NOTIFICATIONS


async def _idle(testbed: Testbed) -> float:
    """Cores of PostgreSQL that a worker without work keeps busy: what each worker beyond the first adds."""
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
