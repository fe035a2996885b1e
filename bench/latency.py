"""`latency`: the time from just before the submitting statement to the first line of the handler, at a steady pace.

The handler itself notes the time: `task.started_at` would leave out the claim's commit and all that follows it.
"""

from __future__ import annotations

import asyncio
import os
import time
from statistics import median
from uuid import UUID

from bench.figure import Figure, Goal, quantile
from bench.jobs import until_finished
from bench.pipelines import stamped
from bench.processes import Meter
from bench.scale import Scale
from bench.submitter import Submitter, submitter
from bench.testbed import Installation, Testbed
from leasehold.transitions.jobs import NewJob

_P50_MS, _P99_MS = Goal(3), Goal(8)
WARM_UP_JOBS = 20


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [*await _paced(testbed, scale, "amqp", _P50_MS, _P99_MS), *await _paced(testbed, scale, "postgres")]


async def _paced(
    testbed: Testbed, scale: Scale, broker: str, p50: Goal | None = None, p99: Goal | None = None
) -> list[Figure]:
    waits, load, meters = [], [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        with Meter() as meter:
            waits.append(await paced_run(testbed, scale, broker))
        meters.append(meter)
    details = {
        "jobs": scale.paced_jobs,
        "jobs_per_second": scale.paced_rate,
        "max_ms": [round(max(run), 2) for run in waits],
        "cores_busy_by_others": [meter.others_cores for meter in meters],
    }
    name = f"latency, {broker}"
    return [
        Figure(f"{name}, p50", "ms", tuple(median(run) for run in waits), tuple(load), p50, details),
        Figure(f"{name}, p99", "ms", tuple(quantile(run, 0.99) for run in waits), tuple(load), p99, details),
    ]


async def paced_run(testbed: Testbed, scale: Scale, broker: str) -> list[float]:
    """The milliseconds that each job waited for its handler, after a warm-up."""
    async with testbed.installation(broker=broker, pipelines="bench.pipelines:benched") as installation:
        worker = await installation.start_worker()
        async with submitter(installation) as submitting:
            await submit_paced(submitting, WARM_UP_JOBS, scale.paced_rate)
            await until_finished(installation, worker)
            submitted_at = await submit_paced(submitting, scale.paced_jobs, scale.paced_rate)
            await until_finished(installation, worker)
        return await waits_ms(installation, submitted_at)


async def submit_paced(submitting: Submitter, jobs: int, rate: float) -> dict[UUID, float]:
    """Submit at a steady pace. Returns the time of each submission by job id."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    submitted_at = {}
    for number in range(jobs):
        await asyncio.sleep(began + number / rate - loop.time())
        new = NewJob(stamped, "bench")
        submitted_at[new.id] = time.time()
        await submitting.submit(new)
    return submitted_at


async def waits_ms(installation: Installation, submitted_at: dict[UUID, float]) -> list[float]:
    async with installation.connection() as connection:
        rows = await connection.fetch(
            "SELECT t.job_id, (r.value->>'handler_at')::float8 AS at FROM result r JOIN task t ON t.id = r.task_id"
            " WHERE t.job_id = ANY($1::uuid[])",
            list(submitted_at),
        )
    if len(rows) != len(submitted_at):
        raise RuntimeError(f"{len(rows)} of {len(submitted_at)} jobs have recorded when they started")
    return [1000 * (row["at"] - submitted_at[row["job_id"]]) for row in rows]
