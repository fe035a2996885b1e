"""`burst`: the no-op jobs a second of a burst that comes to an idle installation, submitted while a worker runs.

The statistics of a new installation are empty. In an installation that has been idle, a vacuum has counted the few rows
that are left, and PostgreSQL plans for these. The bench measures both in turns. Their ratio shows how much the plans
of the quiet time cost the burst.
"""

from __future__ import annotations

import os

from bench.figure import Figure, Goal
from bench.jobs import now, seconds_of, until_finished
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.pipelines.demo.pipeline import noop

_FEW_JOBS = 3  # the rows that the vacuum counts


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    rates: dict[bool, list[float]] = {False: [], True: []}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        for was_idle, runs in rates.items():
            runs.append(await _rate(testbed, scale.jobs, was_idle=was_idle))
    ratios = tuple(after / new for new, after in zip(rates[False], rates[True], strict=True))
    return [
        Figure("burst, new installation", "jobs/s", tuple(rates[False]), tuple(load)),
        Figure("burst, after a quiet time", "jobs/s", tuple(rates[True]), tuple(load)),
        Figure(
            "burst, after a quiet time, to a new installation", "ratio", ratios, tuple(load), Goal(0.8, at_least=True)
        ),
    ]


async def _rate(testbed: Testbed, jobs: int, *, was_idle: bool) -> float:
    async with testbed.installation(broker="amqp") as installation:
        server = await installation.start_worker()
        await _submit(installation, _FEW_JOBS)
        await until_finished(installation, server)
        if was_idle:
            async with installation.connection() as connection:
                await connection.execute("VACUUM ANALYZE")
        await _submit(installation, 1)  # the worker plans its statements
        await until_finished(installation, server)
        since = await now(installation)
        await _submit(installation, jobs)
        await until_finished(installation, server)
        return jobs / await seconds_of(installation, since)


async def _submit(installation: Installation, jobs: int) -> None:
    async with submitter(installation) as submitting:
        await submitting.fill(noop, jobs)
