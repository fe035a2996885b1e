"""The tables of `scripts/bench simulate`: predictions beside measurements, fleets in cells, and PostgreSQL by its
cores.

`known` in this module is what bench/simulate.py has written to costs.json: `costs`, and for each fleet that was
`measured` its `rate` and the cores that `others` took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from bench.simulation import Costs, Outcome, Plan, simulate

#: The fleets that are measured, and predicted from the costs of the first.
FLEETS = (1, 2, 4, 8)
_WORKERS, _CELLS, _CORES = (10, 100, 1000), (1, 2, 5, 10, 20, 50), (2, 4, 8, 16, 32)
#: In the tables: the seconds that a task waits for something else, and the tasks that a worker has at once.
_TASK_SECONDS, _SLOTS = 1.0, 32
#: A fleet of more workers ends so many tasks that the simulation of one second is enough.
_MANY = 100
#: Between a worker and PostgreSQL, in another machine of the same site.
_TRIP_SECONDS = 0.0005
#: What a cell has. A classic queue is one process of RabbitMQ, so one core.
_LIMITS = {"cores": 16.0, "sessions": 1000.0, "log": 200e6, "broker": 1.0, "LISTEN": 4.0}
#: Sessions of a process (`database_pool_size`), runs a second of an API process (docs/explanation/performance.md), and
#: notifications a second of a process (leasehold/broker/postgres.py).
_SESSIONS, _RUNS_OF_API, _NOTIFICATIONS = 12, 2000, 200


#: Broker -> the parts that a cell with it has. Without RabbitMQ, hints are notifications of PostgreSQL (LISTEN).
_PARTS = {"amqp": ("cores", "sessions", "log", "broker"), "postgres": ("cores", "sessions", "log", "LISTEN")}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with `workers`. `used`: part of `_LIMITS` -> how much of it is used."""

    workers: int
    outcome: Outcome
    used: Mapping[str, float]

    @property
    def breaks_first(self) -> str:
        """The part that is nearest to its limit."""
        return max(self.used, key=self.share)

    def share(self, part: str) -> float:
        return self.used[part] / _LIMITS[part]


def cell(costs: Costs, workers: int, seed: int, broker: str = "amqp") -> Cell:
    plan = Plan(
        workers=workers,
        cores=int(_LIMITS["cores"]),
        shared=False,
        slots=_SLOTS,
        task_seconds=_TASK_SECONDS,
        trip_seconds=_TRIP_SECONDS,
    )
    if broker != "amqp":
        costs = replace(costs, broker_task=0.0)
    outcome = simulate(costs, plan, seed=seed, seconds=3.0 if workers <= _MANY else 1.0)
    apis = max(1, ceil(outcome.rate / _RUNS_OF_API))
    notifications = min(outcome.rate, apis * _NOTIFICATIONS)
    listening = notifications * workers * costs.database_notification
    used = {
        "cores": outcome.database + (listening if broker != "amqp" else 0.0),
        "sessions": float((workers + apis) * _SESSIONS),
        "log": outcome.rate * costs.log_bytes,
        "broker": outcome.broker,
        "LISTEN": listening,
    }
    return Cell(workers, outcome, {part: used[part] for part in _PARTS[broker]})


def predicted_rate(costs: Costs, workers: int, known: Mapping[str, Any], seed: int) -> float:
    """The jobs a second with which a fleet drains a queue on a machine like that of `known`, but for other programs."""
    plan = Plan(workers, known["cores"], shared=True, backlog=known["jobs"])
    return simulate(costs, plan, seed=seed).rate


def comparison(known: Mapping[str, Any], seed: int) -> list[str]:
    """The predicted and the measured rate of each of FLEETS."""
    costs = Costs.of(known["costs"])
    head = "workers", "cores of other programs", "predicted", "measured", "predicted to measured"
    lines = [_row(head), _row(["---"] * len(head))]
    for workers in FLEETS:
        rate = predicted_rate(costs, workers, known, seed)
        measurement = known["measured"][str(workers)]
        measured = measurement["rate"]
        lines.append(
            _row(
                [
                    str(workers),
                    f"{measurement['others']:.1f}",
                    f"{rate:,.0f} jobs/s",
                    f"{measured:,.0f} jobs/s",
                    f"{rate / measured:.2f}",
                ]
            )
        )
    return lines


def cells(costs: Costs, seed: int, broker: str = "amqp") -> list[str]:
    """What fleets do that are divided into cells, and what a cell uses of its limits."""
    head = "workers", "cells", "jobs/s", *(_NAMES[part] for part in _PARTS[broker]), "breaks first"
    lines = [_row(head), _row(["---"] * len(head))]
    simulated: dict[int, Cell] = {}
    for workers in _WORKERS:
        for count in _CELLS if broker == "amqp" else (1,):
            if count > workers:
                continue
            share = workers // count
            simulated[share] = simulated.get(share) or cell(costs, share, seed, broker)
            lines.append(_row(_cells_row(workers, count, simulated[share])))
    return lines


def _cells_row(workers: int, count: int, simulated: Cell) -> list[str]:
    first = simulated.breaks_first
    return [
        f"{workers:,}",
        str(count),
        f"{simulated.outcome.rate * count:,.0f}",
        *(_SHOWN[part](used) for part, used in simulated.used.items()),
        f"{_NAMES[first]}: {100 * simulated.share(first):.0f} %",
    ]


_NAMES = {
    "cores": "PostgreSQL's cores",
    "sessions": "sessions",
    "log": "the log",
    "broker": "the broker's queue",
    "LISTEN": "LISTEN",
}
_SHOWN: Mapping[str, Callable[[float], str]] = {
    "cores": "{:.1f}".format,
    "sessions": "{:,.0f}".format,
    "log": lambda used: f"{used / 1e6:.1f} MB/s",
    "broker": lambda used: f"{100 * used:.0f} %",
    "LISTEN": "{:.2f} cores".format,
}


def _limits() -> str:
    return (
        f"{_LIMITS['cores']:.0f} cores, {_LIMITS['sessions']:,.0f} sessions, {_LIMITS['log'] / 1e6:.0f} MB of log a "
        "second, and one core of the broker for its one queue"
    )


def by_cores(costs: Costs, seed: int) -> list[str]:
    """How much one PostgreSQL can do, by its cores: with as many workers as it needs, and tasks that do nothing."""
    lines = ["| cores of PostgreSQL | workers | jobs/s | tasks a statement | slowest of 100 statements |"]
    lines.append("|---|---|---|---|---|")
    for cores in _CORES:
        plan = Plan(2 * cores, cores, shared=False, trip_seconds=_TRIP_SECONDS)
        outcome = simulate(costs, plan, seed=seed, seconds=1.0, warm_up=1.0)
        lines.append(
            f"| {cores} | {plan.workers} | {outcome.rate:,.0f} | {outcome.batch:.0f} |"
            f" {1000 * outcome.worst_commit:.1f} ms |"
        )
    return lines


def _row(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def costs_of(costs: Costs) -> list[str]:
    lines = ["| cost, by one worker | |", "|---|---|"]
    for name, value in asdict(costs).items():
        shown = f"{value:,.0f} bytes" if name == "log_bytes" else f"{1e6 * value:,.0f} µs"
        lines.append(f"| {name.replace('_', ' ').removesuffix(' seconds').removesuffix(' bytes')} | {shown} |")
    return lines


def page(known: Mapping[str, Any], seed: int) -> str:
    """The tables, as they stand in the page."""
    costs = Costs.of(known["costs"])
    tables = {
        f"`scripts/bench simulate --seed {seed}` prints these tables, from these costs:": costs_of(costs),
        f"Drains of {known['jobs']:,} jobs, all processes on the same {known['cores']} cores:": comparison(known, seed),
        f"Tasks that wait {_TASK_SECONDS:g} s for something else, {_SLOTS} at once in a worker. PostgreSQL has "
        f"{_LIMITS['cores']:.0f} cores. All columns after jobs/s are those of one cell. What breaks first is nearest "
        f"to its limit. The limits are assumed: {_limits()}:": cells(costs, seed),
        "The same without RabbitMQ (`LEASEHOLD_BROKER=postgres`), in one cell. PostgreSQL wakes each session that "
        f"listens, for which {_LIMITS['LISTEN']:.0f} of its cores are assumed:": cells(costs, seed, "postgres"),
        "Tasks that do nothing, with twice as many workers as PostgreSQL has cores:": by_cores(costs, seed),
    }
    return "\n\n".join("\n".join([sentence, "", *lines]) for sentence, lines in tables.items()) + "\n"
