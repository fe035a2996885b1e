"""`latency`: the time from just before the submitting statement to the first line of the handler, at a steady pace.

The handler itself reads the clock, because `task.started_at` is before the claim's commit and what follows it. The
details of each figure divide the time into stages (STAGES).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
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
#: The stages of a job's wait, in order, each named after what ends it: `statement` until PostgreSQL writes the job's
#: row; `commit` until the submitter has the answer; `hint` until a claim marks the task; `claim` until the worker has
#: the answer and the handler begins.
STAGES = ("statement", "commit", "hint", "claim")


@dataclass(frozen=True, slots=True)
class Submission:
    """When the submitting statement was sent, and when its answer had arrived: Unix times."""

    sent_at: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class Waits:
    """For how many milliseconds each job of a run waited for its handler: in all, and by stage."""

    whole: list[float]
    stages: Mapping[str, list[float]]

    def stages_as_details(self) -> dict[str, dict[str, float]]:
        parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        return {
            stage: {name: round(quantile(waits, part), 2) for name, part in parts.items()}
            for stage, waits in self.stages.items()
        }


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [*await _paced(testbed, scale, "amqp", _P50_MS, _P99_MS), *await _paced(testbed, scale, "postgres")]


async def _paced(
    testbed: Testbed, scale: Scale, broker: str, p50: Goal | None = None, p99: Goal | None = None
) -> list[Figure]:
    runs: list[Waits] = []
    load, meters = [], []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        with Meter() as meter:
            runs.append(await paced_run(testbed, scale, broker))
        meters.append(meter)
    waits = [run.whole for run in runs]
    details = {
        "jobs": scale.paced_jobs,
        "jobs_per_second": scale.paced_rate,
        "max_ms": [round(max(run), 2) for run in waits],
        "stages_ms": [run.stages_as_details() for run in runs],
        "cores_busy_by_others": [meter.others_cores for meter in meters],
    }
    name = f"latency, {broker}"
    return [
        Figure(f"{name}, p50", "ms", tuple(median(run) for run in waits), tuple(load), p50, details),
        Figure(f"{name}, p99", "ms", tuple(quantile(run, 0.99) for run in waits), tuple(load), p99, details),
    ]


async def paced_run(testbed: Testbed, scale: Scale, broker: str) -> Waits:
    """How long each job waited for its handler, after a warm-up."""
    async with testbed.installation(broker=broker, pipelines="bench.pipelines:benched") as installation:
        worker = await installation.start_worker()
        async with submitter(installation) as submitting:
            await submit_paced(submitting, WARM_UP_JOBS, scale.paced_rate)
            await until_finished(installation, worker)
            submitted = await submit_paced(submitting, scale.paced_jobs, scale.paced_rate)
            await until_finished(installation, worker)
        return await waits_of(installation, submitted)


async def submit_paced(submitting: Submitter, jobs: int, rate: float) -> dict[UUID, Submission]:
    """Submit at a steady pace. Returns the submissions by job id."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    submitted = {}
    for number in range(jobs):
        await asyncio.sleep(began + number / rate - loop.time())
        new = NewJob(stamped, "bench")
        sent_at = time.time()
        await submitting.submit(new)
        submitted[new.id] = Submission(sent_at, time.time())
    return submitted


async def waits_of(installation: Installation, submitted: Mapping[UUID, Submission]) -> Waits:
    """How long the jobs waited. Raises RuntimeError if some handlers have not begun."""
    async with installation.connection() as connection:
        rows = await connection.fetch(
            "SELECT t.job_id, extract(epoch FROM j.created_at)::float8 AS written_at,"
            " extract(epoch FROM t.started_at)::float8 AS claimed_at, (r.value->>'handler_at')::float8 AS handler_at"
            " FROM result r JOIN task t ON t.id = r.task_id JOIN job j ON j.id = t.job_id"
            " WHERE t.job_id = ANY($1::uuid[])",
            list(submitted),
        )
    if len(rows) != len(submitted):
        raise RuntimeError(f"{len(rows)} of {len(submitted)} jobs have recorded when they started")
    instants = [
        (job.sent_at, row["written_at"], job.answered_at, row["claimed_at"], row["handler_at"])
        for row in rows
        for job in [submitted[row["job_id"]]]
    ]
    return Waits(
        [_ms(times[0], times[-1]) for times in instants],
        {stage: [_ms(*times[n : n + 2]) for times in instants] for n, stage in enumerate(STAGES)},
    )


def _ms(*ends: float) -> float:
    began, ended = ends
    return 1000 * (ended - began)
