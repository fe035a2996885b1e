"""`steady`: compares the end of a long steady load with its beginning, while a session holds a snapshot that is older
than the first job.

An installation with RabbitMQ and one without share the servers. The time is cut into windows.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from uuid import UUID

from bench.figure import Curve, Figure, Goal, quantile
from bench.latency import Submission, submit_paced, waits_of
from bench.processes import Meter
from bench.scale import Scale
from bench.submitter import Submitter, submitter
from bench.testbed import Installation, Testbed

_BROKERS = ("amqp", "postgres")
_LAST_SECONDS = 2.0  # until a window's last jobs have started: polling for that would load the measured database
_LATE_SECONDS = 60.0  # further time for jobs that are late
_GOAL = Goal(1.2)


@dataclass
class _Side:
    """One installation, with p50 and p99 of each window, in ms."""

    installation: Installation
    submitting: Submitter
    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    """Measure one run, also if more are requested: a run is long."""
    jobs = max(1, round(scale.steady_rate * 60 * scale.steady_minutes / scale.steady_windows))
    load, cpu, by_role = os.getloadavg()[0], [], []
    async with AsyncExitStack() as opened:
        sides = {broker: await opened.enter_async_context(_side(testbed, broker)) for broker in _BROKERS}
        await _window(sides, round(scale.steady_rate), scale.steady_rate)  # a warm-up
        for _ in range(scale.steady_windows):
            with Meter() as meter:
                waits = await _window(sides, jobs, scale.steady_rate)
            for broker, waits_by_broker in waits.items():
                sides[broker].p50.append(round(median(waits_by_broker), 2))
                sides[broker].p99.append(round(quantile(waits_by_broker, 0.99), 2))
            spent = sum(seconds for role, seconds in meter.by_role.items() if role != "bench")
            by_role.append(meter.by_role)
            cpu.append(round(1000 * spent / (jobs * len(sides)), 3))
    ends = [scale.steady_minutes * (number + 1) / scale.steady_windows for number in range(scale.steady_windows)]

    def curve(label: str, unit: str, values: Sequence[float]) -> Curve:
        return Curve(label, unit, "minutes under an old snapshot", tuple(zip(ends, values, strict=True)))

    long = f"{scale.steady_minutes:g} minutes of {scale.steady_rate:g} jobs/s under an old snapshot"
    return [
        *(
            Figure(f"latency after {long}, {broker}, to the beginning, p50", "ratio", (side.p50[-1] / side.p50[0],),
                   (load,), _GOAL, {"p50_ms": side.p50, "p99_ms": side.p99}, curve(f"p50, {broker}", "ms", side.p50))
            for broker, side in sides.items()
        ),
        Figure(f"CPU of a job after {long}, to the beginning", "ratio", (cpu[-1] / cpu[0],), (load,), _GOAL,
               {"cpu_seconds_a_1000_jobs": cpu, "by_role": by_role}, curve("CPU", "seconds a 1,000 jobs", cpu)),
    ]  # fmt: skip


@asynccontextmanager
async def _side(testbed: Testbed, broker: str) -> AsyncIterator[_Side]:
    """An installation with an open snapshot of its database."""
    async with (
        testbed.installation(broker=broker, pipelines="bench.pipelines:benched") as installation,
        installation.connection() as holder,
        holder.transaction(isolation="repeatable_read", readonly=True),
    ):
        await holder.fetchval("SELECT count(*) FROM job")
        await installation.start_worker()
        async with submitter(installation) as submitting:
            yield _Side(installation, submitting)


async def _window(sides: dict[str, _Side], jobs: int, rate: float) -> dict[str, list[float]]:
    """The milliseconds that each job waited for its handler, by broker."""

    async def submit(side: _Side) -> dict[UUID, Submission]:
        return await submit_paced(side.submitting, jobs, rate)

    submitted_by_broker = await asyncio.gather(*(submit(side) for side in sides.values()))
    await asyncio.sleep(_LAST_SECONDS)
    waits_by_broker = {
        broker: await _waits(side.installation, submitted)
        for (broker, side), submitted in zip(sides.items(), submitted_by_broker, strict=True)
    }
    summary = ", ".join(f"{broker} {median(waits):.2f}, {max(waits):.0f}" for broker, waits in waits_by_broker.items())
    sys.stderr.write(f"a window of {jobs} jobs; p50 and longest, ms: {summary}\n")
    return waits_by_broker


async def _waits(installation: Installation, submitted: dict[UUID, Submission]) -> list[float]:
    """The waits of the jobs. Raises RuntimeError if some jobs do not start within _LATE_SECONDS."""
    until = monotonic() + _LATE_SECONDS
    while True:
        try:
            return (await waits_of(installation, submitted)).whole
        except RuntimeError:
            if monotonic() > until:
                raise
        await asyncio.sleep(_LAST_SECONDS)
