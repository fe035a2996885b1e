"""`fleet`: what a job costs when more workers share the work, all of them on the same cores."""

from __future__ import annotations

from bench.figure import Figure, Goal
from bench.scale import Scale
from bench.testbed import Testbed
from bench.throughput import Case, Run, drain

_WORKERS = (1, 2, 4, 8)
_GOAL = Goal(1.2)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    """In turns, so that each size meets the same minutes of the machine."""
    found: dict[int, list[Run]] = {workers: [] for workers in _WORKERS}
    for _ in range(scale.runs):
        for workers in _WORKERS:
            found[workers].append(await drain(testbed, scale, Case("amqp", workers, {"broker": "amqp"})))
    load = {workers: tuple(run.load for run in runs) for workers, runs in found.items()}
    figures = [
        Figure(f"throughput, amqp, {workers} of the fleet", "jobs/s", tuple(run.rate for run in runs), load[workers],
               details={"cpu_seconds": [run.meter.by_role for run in runs], "claims": [run.claims for run in runs]})
        for workers, runs in found.items()
    ]  # fmt: skip
    few, many = _WORKERS[0], _WORKERS[-1]
    ratios = tuple(_cpu(a) / _cpu(b) for a, b in zip(found[many], found[few], strict=True))
    return [*figures, Figure(f"CPU of a job with {many} workers, to with {few}", "ratio", ratios, load[many], _GOAL)]


def _cpu(run: Run) -> float:
    return sum(seconds for role, seconds in run.meter.by_role.items() if role != "bench")
