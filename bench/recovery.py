"""`recovery`: how long no work is done after a worker, the database, the broker, or all of them are killed.

The time of a kill is read on the bench's clock, and what the platform then does on the database's clock. Both are
clocks of one machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from statistics import median
from uuid import UUID

import asyncpg

from bench.figure import Figure, Goal, quantile
from bench.jobs import until_finished
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.db.database import connect
from leasehold.pipelines.demo.pipeline import demo_long_task, noop
from leasehold.transitions.jobs import NewJob, submit

_KILLS = 17  # of one run
_BACKLOG = 10_000
_PATIENCE_SECONDS = 90.0
_BROKER_CONNECTIONS = 2  # of a worker: one publishes, one consumes
_MANY_LOSSES: dict[str, object] = {"max_losses": 100}  # more than any task may have
_WITHOUT_PRESENCE: dict[str, object] = _MANY_LOSSES | {
    "presence": "false",
    "lease_seconds": 10,
    "renew_seconds": 3,
    "trust_margin_seconds": 2,
}


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [
        *await _takeovers(testbed, scale),
        await _takeover_without_presence(testbed, scale),
        await _database(testbed, scale),
        *await _broker(testbed, scale),
        *await _cold_restart(testbed, scale),
    ]


# --- a worker is killed


async def _takeovers(testbed: Testbed, scale: Scale) -> list[Figure]:
    runs, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation() as installation:
            runs.append(await _kill_in_turn(installation, _KILLS, _MANY_LOSSES))
    details = {"kills": [len(run) for run in runs], "max_ms": [round(max(run)) for run in runs]}
    return [
        Figure(
            "killed worker to running elsewhere, p50", "ms", tuple(map(median, runs)), tuple(load), Goal(500), details
        ),
        Figure(
            "killed worker to running elsewhere, p99", "ms", tuple(quantile(r, 0.99) for r in runs), tuple(load),
            Goal(1000), details,
        ),
    ]  # fmt: skip


async def _takeover_without_presence(testbed: Testbed, scale: Scale) -> Figure:
    runs, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation() as installation:
            runs.append(await _kill_in_turn(installation, 2, _WITHOUT_PRESENCE))
    goal = Goal(1000 * (10 + 10))
    return Figure("the same without presence, lease 10 s, max", "ms", tuple(map(max, runs)), tuple(load), goal)


async def _kill_in_turn(installation: Installation, kills: int, settings: dict[str, object]) -> list[float]:
    """Kill the worker that runs a long step, `kills` times; a new worker joins each time. Returns, for each kill, the
    milliseconds until another worker has claimed the step.
    """
    for _ in range(2):
        await installation.start_worker(**settings)
    job = NewJob(demo_long_task, "bench", params={"seconds": 3600.0})
    spent = []
    async with installation.connection() as connection:
        async with submitter(installation) as submitting:
            await submitting.submit(job)
        for _ in range(kills):
            epoch, victim = await _holder(connection, job.id)
            await asyncio.sleep(0.3)
            killed_at = time.time()
            os.kill(victim, signal.SIGKILL)
            at = await _claimed_after(connection, job.id, epoch)
            spent.append(1000 * (at - killed_at))
            await installation.start_worker(**settings)
    return spent


async def _holder(connection: asyncpg.Connection[asyncpg.Record], job_id: UUID) -> tuple[int, int]:
    """The epoch of the long step, and the id of the process that runs it."""
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            row = await connection.fetchrow(
                "SELECT t.epoch, w.pid FROM task t JOIN worker w ON w.id = t.lease_owner"
                " WHERE t.job_id = $1 AND t.step = 'execute' AND t.status = 'running'",
                job_id,
            )
            if row is not None:
                return row["epoch"], row["pid"]
            await asyncio.sleep(0.02)


async def _claimed_after(connection: asyncpg.Connection[asyncpg.Record], job_id: UUID, epoch: int) -> float:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            at = await connection.fetchval(
                "SELECT extract(epoch FROM min(at))::float8 FROM history WHERE job_id = $1 AND step = 'execute'"
                " AND kind IN ('claimed', 'taken_over') AND epoch > $2",
                job_id,
                epoch,
            )
            if at is not None:
                return float(at)
            await asyncio.sleep(0.01)


# --- a server is killed


async def _database(testbed: Testbed, scale: Scale) -> Figure:
    spent, load = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation() as installation:
            await installation.start_worker()
            async with submitter(installation) as submitting:
                await submitting.fill(noop, 20)
            await testbed.kill_postgres()
            await testbed.start_postgres()
            back_at = time.time()
            spent.append(await _first_claim_after(installation, back_at))
    return Figure("database back to the first claim", "s", tuple(spent), tuple(load), Goal(5))


async def _first_claim_after(installation: Installation, since: float) -> float:
    job = NewJob(noop, "bench")
    await _write(installation, job)
    async with installation.connection() as connection:
        return await _until_started(connection, job.id) - since


async def _until_started(connection: asyncpg.Connection[asyncpg.Record], job_id: UUID) -> float:
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while True:
            at = await connection.fetchval(
                "SELECT extract(epoch FROM started_at)::float8 FROM job WHERE id = $1", job_id
            )
            if at is not None:
                return float(at)
            await asyncio.sleep(0.02)


async def _broker(testbed: Testbed, scale: Scale) -> list[Figure]:
    starts_without, returns, load = [], [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation() as installation:
            worker = await installation.start_worker()
            async with submitter(installation) as submitting:
                await submitting.fill(noop, 20)
            await testbed.flush_rabbitmq()
            await testbed.kill_rabbitmq()
            starts_without.append(await _wait_of(installation, lambda job: _write(installation, job)))
            await testbed.start_rabbitmq()
            began = time.time()
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while worker.log.read_bytes().count(b"broker is back") < _BROKER_CONNECTIONS:  # noqa: ASYNC110 - a log has no event
                    await asyncio.sleep(0.02)
            returns.append(time.time() - began)
    return [
        Figure("a job's start without the broker", "s", tuple(starts_without), tuple(load), Goal(5)),
        Figure("broker back to consuming", "s", tuple(returns), tuple(load), Goal(15)),
    ]


async def _write(installation: Installation, job: NewJob) -> None:
    """Write the job's rows without a hint, so that only a poll can find it."""
    connection = await connect(installation.settings, "bench")
    try:
        await submit(connection, [job])
    finally:
        await connection.close()


async def _wait_of(installation: Installation, write: Callable[[NewJob], Awaitable[None]]) -> float:
    job = NewJob(noop, "bench")
    began = time.time()
    await write(job)
    async with installation.connection() as connection:
        return await _until_started(connection, job.id) - began


# --- everything is killed


async def _cold_restart(testbed: Testbed, scale: Scale) -> list[Figure]:
    """Kill the database, the broker and the worker while ten thousand jobs wait, and start them again."""
    serving, ratios, load = [], [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation() as installation:
            worker = await installation.start_worker()
            async with submitter(installation) as submitting:
                await submitting.fill(noop, _BACKLOG)
                await until_finished(installation, worker)
                steady = await _rate(installation)
                await _kill_workers(installation)
                await submitting.fill(noop, _BACKLOG)
            await testbed.flush_rabbitmq()
            await asyncio.gather(testbed.kill_postgres(), testbed.kill_rabbitmq())
            began = time.time()
            await asyncio.gather(testbed.start_postgres(), testbed.start_rabbitmq())
            worker = await installation.start_worker()
            await until_finished(installation, worker)
            async with installation.connection() as connection:
                first = await connection.fetchval(
                    "SELECT extract(epoch FROM min(started_at))::float8 FROM job"
                    " WHERE started_at > to_timestamp($1)", began,
                )  # fmt: skip
                twice = await connection.fetchval("SELECT count(*) FROM task WHERE epoch <> 1")
            if twice:
                raise RuntimeError(f"{twice} tasks ran more than once")
            serving.append(first - began)
            ratios.append(await _rate(installation, began) / steady)
    return [
        Figure("cold restart of everything to serving, 10,000 queued", "s", tuple(serving), tuple(load), Goal(30)),
        Figure(
            "drain rate after it to steady", "ratio", tuple(ratios), tuple(load), Goal(0.9, at_least=True)
        ),
    ]  # fmt: skip


async def _kill_workers(installation: Installation) -> None:
    async with installation.connection() as connection:
        for row in await connection.fetch("SELECT pid FROM worker"):
            os.kill(row["pid"], signal.SIGKILL)


async def _rate(installation: Installation, since: float = 0.0) -> float:
    async with installation.connection() as connection:
        rate: float = await connection.fetchval(
            "SELECT count(*) / extract(epoch FROM max(finished_at) - min(started_at))::float8 FROM job"
            " WHERE started_at > to_timestamp($1)",
            since,
        )
    return rate
