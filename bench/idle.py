"""`idle`: the CPU and the memory of an API and a worker that have had no work yet."""

from __future__ import annotations

import asyncio
import os

from bench.figure import Figure, Goal
from bench.http import until_ready
from bench.processes import cpu_seconds, main_processes_of, ours, resident_bytes, tree
from bench.scale import Scale
from bench.testbed import Testbed
from leasehold.embedded.ports import free_port

_MB = 1_000_000
_CPU_GOAL = Goal(2)  # per cent of a core
_MEMORY_GOAL = Goal(150)
_ROLES = ("worker", "api", "postgres", "rabbitmq")


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    runs, load = [], []
    for _ in range(scale.runs):
        async with testbed.installation() as installation:
            port = free_port()
            await installation.start("api", api_port=port)
            await installation.start_worker()
            await until_ready(port)
            await asyncio.sleep(scale.settle_seconds)
            load.append(os.getloadavg()[0])
            runs.append(await _costs(scale.idle_seconds))

    def figure(name: str, unit: str, goal: Goal | None = None) -> Figure:
        return Figure(f"idle, {name}", unit, tuple(run[name] for run in runs), tuple(load), goal)

    return [
        figure("worker and its children, CPU", "% of a core", _CPU_GOAL),
        figure("API, CPU", "% of a core"),
        figure("PostgreSQL, CPU", "% of a core"),
        figure("RabbitMQ, CPU", "% of a core"),
        figure("worker, resident", "MB", _MEMORY_GOAL),
        figure("largest child of the worker, resident", "MB", _MEMORY_GOAL),
        figure("API, resident", "MB", _MEMORY_GOAL),
    ]


async def _costs(seconds: float) -> dict[str, float]:
    before = _cpu_by_role()
    await asyncio.sleep(seconds)
    spent = {role: 100 * (after - before[role]) / seconds for role, after in _cpu_by_role().items()}
    (worker,), (api,) = main_processes_of("worker"), main_processes_of("api")
    children = [resident_bytes(pid) for pid in tree(worker)[1:]]
    return {
        "worker and its children, CPU": spent["worker"],
        "API, CPU": spent["api"],
        "PostgreSQL, CPU": spent["postgres"],
        "RabbitMQ, CPU": spent["rabbitmq"],
        "worker, resident": resident_bytes(worker) / _MB,
        "largest child of the worker, resident": max(children, default=0) / _MB,
        "API, resident": resident_bytes(api) / _MB,
    }


def _cpu_by_role() -> dict[str, float]:
    processes = ours()
    return {role: sum(cpu_seconds(pid) for pid, of_role in processes if of_role == role) for role in _ROLES}
