"""`throughput`: the no-op jobs a second that warm workers drain from a filled queue, on durable servers.

One job is a committed claim and a committed completion with their events. The queue is classic and durable; its
messages are persistent and confirmed. Workers with a broker also poll the database for overdue tasks, and the tasks of
a backlog are overdue. So the bench measures AMQP without these polls, and with them, as by default.

Each case also gives the CPU seconds of a thousand jobs, and what a drain writes (writes.py): claims, settlements, other
writes of workers and PostgreSQL meanwhile, and the whole pages that follow a checkpoint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from bench.figure import Figure, Goal
from bench.jobs import now, seconds_of, until_finished
from bench.metrics import claims_by, statements_by
from bench.processes import Meter, main_processes_of, paused
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from bench.writes import Writes
from leasehold.embedded.ports import free_port
from leasehold.pipelines.demo.pipeline import noop

_GOAL, _GOAL_OF_TWO = Goal(6000, at_least=True), Goal(8000, at_least=True)  # by the number of workers, over AMQP
#: Settings of workers that do not poll during a measurement.
_HINTS_ONLY = {"broker": "amqp", "poll_seconds": 3600}
#: A busy session publishes its counts with its first statement after this many seconds. So a few more jobs follow.
_PUBLISHED_SECONDS = 1.1
_ENDED_SECONDS = 0.3  # until a closed session has published its counts
_PATIENT_HEARTBEAT = 60  # so that RabbitMQ keeps the connection of a worker that is stopped while the queue is filled


@dataclass(frozen=True, slots=True)
class Run:
    rate: float
    load: float
    meter: Meter
    claims: dict[str, int]
    statements: dict[str, int]
    writes: Writes  # of the drain, a job

    def cpu_of_a_thousand(self, jobs: int, role: str) -> float:
        """CPU seconds of the processes with this role (processes.py), for a thousand jobs."""
        return 1000 * self.meter.by_role.get(role, 0.0) / jobs


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workers: int
    settings: Mapping[str, object]
    goal: Goal | None = None


CASES = (
    Case("amqp, hints only", 1, _HINTS_ONLY, _GOAL),
    Case("amqp, hints only", 2, _HINTS_ONLY, _GOAL_OF_TWO),
    Case("amqp", 1, {"broker": "amqp"}, _GOAL),
    Case("amqp", 2, {"broker": "amqp"}, _GOAL_OF_TWO),
    Case("postgres", 1, {"broker": "postgres"}),
    Case("postgres", 2, {"broker": "postgres"}),
)


async def measure(testbed: Testbed, scale: Scale, cases: Sequence[Case] = CASES) -> list[Figure]:
    return [figure for case in cases for figure in await _figures(testbed, scale, case)]


async def _figures(testbed: Testbed, scale: Scale, case: Case) -> list[Figure]:
    runs = [await drain(testbed, scale, case) for _ in range(scale.runs)]
    load = tuple(run.load for run in runs)
    name = f"{case.name}, {case.workers} worker{'s' if case.workers > 1 else ''}"
    rate = Figure(
        f"throughput, {name}",
        "jobs/s",
        tuple(run.rate for run in runs),
        load,
        case.goal,
        {
            "jobs": scale.jobs,
            "cpu_seconds": [run.meter.by_role for run in runs],
            "cores_busy_by_others": [run.meter.others_cores for run in runs],
            "claims": [run.claims for run in runs],
            "drain_of_a_job": [run.writes.as_details() for run in runs],
        },
    )
    return [
        rate,
        *(
            Figure(
                f"CPU of a thousand jobs, {name}: {role}",
                "s",
                tuple(run.cpu_of_a_thousand(scale.jobs, role) for run in runs),
                load,
            )
            for role in ("worker", "postgres")
        ),
        Figure(f"WAL of a job in a drain, {name}", "bytes", tuple(run.writes.wal_bytes for run in runs), load),
    ]


async def drain(testbed: Testbed, scale: Scale, case: Case) -> Run:
    """Fill the queue while the workers are stopped, then let them drain it."""
    async with testbed.installation(amqp_heartbeat=_PATIENT_HEARTBEAT, **case.settings) as installation:
        ports = [free_port() for _ in range(case.workers)]
        servers = [await installation.start_worker(metrics_port=port) for port in ports]
        await _fill(installation, scale.warm_up_jobs)
        await until_finished(installation, *servers)
        claimed_before, sent_before = await claims_by(ports), await statements_by(ports)
        since = await now(installation)
        with ExitStack() as measuring:
            with paused(main_processes_of("worker")):
                await _fill(installation, scale.jobs)
                await testbed.checkpoint()
                load = os.getloadavg()[0]
                before = await _writes_so_far(installation)
                meter = measuring.enter_context(Meter())  # before the workers go on: they may finish immediately
            await until_finished(installation, *servers)
        claimed = _since(claimed_before, await claims_by(ports))
        sent = _since(sent_before, await statements_by(ports))
        rate = scale.jobs / await seconds_of(installation, since)
        await asyncio.sleep(_PUBLISHED_SECONDS)
        await _fill(installation, case.workers)
        await until_finished(installation, *servers)
        return Run(rate, load, meter, claimed, sent, (await _writes_so_far(installation)).since(before, scale.jobs))


def _since(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in now.items()}


async def _fill(installation: Installation, jobs: int) -> None:
    """Submit the jobs. Then wait until the counts of the submitter's ended sessions are published."""
    async with submitter(installation) as submitting:
        await submitting.fill(noop, jobs)
    await asyncio.sleep(_ENDED_SECONDS)


async def _writes_so_far(installation: Installation) -> Writes:
    async with installation.connection() as connection:
        return await Writes.so_far(connection)
