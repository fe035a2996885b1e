"""`throughput`: the no-op jobs a second that warm workers drain from a filled queue, on durable servers.

One job is a committed claim and a committed completion with their events; the queue is classic and durable, and its
messages are persistent and were confirmed. With a broker, workers also look into the database for what is overdue,
which a backlog is; a goal for the way over AMQP is measured with that turned off, and the default beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.figure import Figure, Goal
from bench.jobs import now, seconds_of, until_finished
from bench.metrics import claims_by
from bench.processes import Meter, main_processes_of, paused
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Testbed
from leasehold.embedded.ports import free_port
from leasehold.pipelines.demo.pipeline import noop

_GOAL, _GOAL_OF_TWO = Goal(6000, at_least=True), Goal(8000, at_least=True)  # by the number of workers, over AMQP
_NEVER_LOOK = {"broker": "amqp", "poll_seconds": 3600}
_PATIENT_HEARTBEAT = 60  # RabbitMQ keeps the connection of a worker that stands still while the queue is filled


@dataclass(frozen=True, slots=True)
class Run:
    rate: float
    load: float
    meter: Meter
    claims: dict[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    workers: int
    settings: Mapping[str, object]
    goal: Goal | None = None


CASES = (
    Case("amqp, hints only", 1, _NEVER_LOOK, _GOAL),
    Case("amqp, hints only", 2, _NEVER_LOOK, _GOAL_OF_TWO),
    Case("amqp", 1, {"broker": "amqp"}, _GOAL),
    Case("amqp", 2, {"broker": "amqp"}, _GOAL_OF_TWO),
    Case("postgres", 1, {"broker": "postgres"}),
    Case("postgres", 2, {"broker": "postgres"}),
)


async def measure(testbed: Testbed, scale: Scale, cases: Sequence[Case] = CASES) -> list[Figure]:
    return [await _figure(testbed, scale, case) for case in cases]


async def _figure(testbed: Testbed, scale: Scale, case: Case) -> Figure:
    runs = [await drain(testbed, scale, case) for _ in range(scale.runs)]
    return Figure(
        f"throughput, {case.name}, {case.workers} worker{'s' if case.workers > 1 else ''}",
        "jobs/s",
        tuple(run.rate for run in runs),
        tuple(run.load for run in runs),
        case.goal,
        {
            "jobs": scale.jobs,
            "cpu_seconds": [run.meter.by_role for run in runs],
            "cores_busy_by_others": [run.meter.others_cores for run in runs],
            "claims": [run.claims for run in runs],
        },
    )


async def drain(testbed: Testbed, scale: Scale, case: Case) -> Run:
    """Fill the queue while the workers are stopped, then let them drain it."""
    async with testbed.installation(amqp_heartbeat=_PATIENT_HEARTBEAT, **case.settings) as installation:
        ports = [free_port() for _ in range(case.workers)]
        servers = [await installation.start_worker(metrics_port=port) for port in ports]
        async with submitter(installation) as submitting:
            await submitting.fill(noop, scale.warm_up_jobs)
            await until_finished(installation, *servers)
            claimed_before = await claims_by(ports)
            since = await now(installation)
            with paused(main_processes_of("worker")):
                await submitting.fill(noop, scale.jobs)
                await testbed.checkpoint()
                load = os.getloadavg()[0]
        with Meter() as meter:
            await until_finished(installation, *servers)
        claimed = {how: n - claimed_before.get(how, 0) for how, n in (await claims_by(ports)).items()}
        return Run(scale.jobs / await seconds_of(installation, since), load, meter, claimed)
