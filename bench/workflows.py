"""`workflows`: jobs of three steps in a chain, drained from a filled queue, and one at a time."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from statistics import median

from bench.figure import Figure, Goal, quantile
from bench.jobs import now, seconds_of, until_finished
from bench.pipelines import threestep
from bench.processes import Meter, main_processes_of, paused
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Testbed
from leasehold.transitions.jobs import NewJob

_RATE = Goal(1500, at_least=True)
_P50_MS = Goal(8)
_PIPELINES = "bench.pipelines:benched"
_PATIENT_HEARTBEAT = 60  # so that RabbitMQ keeps the connection of a worker that is stopped while the queue is filled


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    return [await _drain(testbed, scale), *await _one_at_a_time(testbed, scale)]


async def _drain(testbed: Testbed, scale: Scale) -> Figure:
    rates, load, cpu_seconds = [], [], []
    jobs = scale.jobs // 3
    for _ in range(scale.runs):
        async with testbed.installation(
            broker="amqp", pipelines=_PIPELINES, amqp_heartbeat=_PATIENT_HEARTBEAT
        ) as installation:
            worker = await installation.start_worker()
            async with submitter(installation) as submitting:
                await submitting.fill(threestep, scale.warm_up_jobs)
                await until_finished(installation, worker)
                since = await now(installation)
                with ExitStack() as measuring:
                    with paused(main_processes_of("worker")):
                        await submitting.fill(threestep, jobs)
                        await testbed.checkpoint()
                        load.append(os.getloadavg()[0])
                        meter = measuring.enter_context(Meter())  # before the worker goes on: it may finish immediately
                    await until_finished(installation, worker)
            rates.append(jobs / await seconds_of(installation, since))
            cpu_seconds.append(meter.by_role)
    return Figure(
        "workflows of three steps, amqp, 1 worker", "jobs/s", tuple(rates), tuple(load), _RATE,
        {"jobs": jobs, "cpu_seconds": cpu_seconds},
    )  # fmt: skip


async def _one_at_a_time(testbed: Testbed, scale: Scale) -> list[Figure]:
    """The time from a job's row to the end of its third step, by the database's clock, at 20 jobs a second."""
    waits, load = [], []
    for _ in range(scale.runs):
        async with testbed.installation(broker="amqp", pipelines=_PIPELINES) as installation:
            worker = await installation.start_worker()
            async with submitter(installation) as submitting:
                load.append(os.getloadavg()[0])
                for _ in range(scale.paced_jobs):
                    await submitting.submit(NewJob(threestep, "bench"))
                    await asyncio.sleep(1 / scale.paced_rate)
                await until_finished(installation, worker)
            async with installation.connection() as connection:
                rows = await connection.fetch(
                    "SELECT 1000 * extract(epoch FROM finished_at - created_at)::float8 AS ms FROM job ORDER BY id"
                )
            waits.append([row["ms"] for row in rows][len(rows) // 10 :])
    name = "a workflow of three steps, alone"
    return [
        Figure(f"{name}, p50", "ms", tuple(median(run) for run in waits), tuple(load), _P50_MS),
        Figure(f"{name}, p99", "ms", tuple(quantile(run, 0.99) for run in waits), tuple(load)),
    ]
