"""`fleet`: the CPU of a job while more workers share the work on the same cores."""

from __future__ import annotations

from bench.figure import Figure, Goal
from bench.scale import Scale
from bench.testbed import Testbed
from bench.throughput import Case, Run, drain

_WORKERS = (1, 2, 4, 8)
_GOAL = Goal(1.2)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    """Measure the sizes in turns, so that a change of the machine's load affects all of them."""
    runs_by_workers: dict[int, list[Run]] = {workers: [] for workers in _WORKERS}
    for _ in range(scale.runs):
        for workers in _WORKERS:
            runs_by_workers[workers].append(await drain(testbed, scale, Case("amqp", workers, {"broker": "amqp"})))
    load = {workers: tuple(run.load for run in runs) for workers, runs in runs_by_workers.items()}
    figures = [
        Figure(f"throughput, amqp, {workers} of the fleet", "jobs/s", tuple(run.rate for run in runs), load[workers],
               details={"cpu_seconds": [run.meter.by_role for run in runs], "claims": [run.claims for run in runs]})
        for workers, runs in runs_by_workers.items()
    ]  # fmt: skip
    fewest, most = _WORKERS[0], _WORKERS[-1]
    ratios = tuple(_cpu(a) / _cpu(b) for a, b in zip(runs_by_workers[most], runs_by_workers[fewest], strict=True))
    return [
        *figures,
        Figure(f"CPU of a job with {most} workers, to with {fewest}", "ratio", ratios, load[most], _GOAL),
    ]


def _cpu(run: Run) -> float:
    return sum(seconds for role, seconds in run.meter.by_role.items() if role != "bench")
