"""`scripts/bench simulate`: what fleets and cells would do that no machine here can hold, and what breaks first.

`--measure` calibrates the model with one worker, and then measures fleets of 1 to 8 workers on the same machine: the
model must predict these before anybody believes it about a thousand. It writes costs and measurements to COSTS. Without
it, the tables are made of what is written there. `--write` puts them into PAGE.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import orjson

from bench.calibration import calibrate
from bench.scale import Scale
from bench.simulation import Costs, Outcome, Plan, simulate
from bench.testbed import Testbed
from bench.throughput import Case, drain

COSTS = Path(__file__).with_name("costs.json")
PAGE = Path(__file__).parents[1] / "docs/operations/scale.md"
_BEGIN, _END = "<!-- simulation: begin -->\n", "<!-- simulation: end -->\n"
#: The fleets that are measured, and predicted from the costs of the first.
FLEETS = (1, 2, 4, 8)
_WORKERS, _CELLS, _CORES = (10, 100, 1000), (1, 2, 5, 10, 20, 50), (2, 4, 8, 16, 32)
#: In the tables: the seconds that a task waits for something else, and the tasks that a worker has at once.
_TASK_SECONDS, _SLOTS = 1.0, 32
#: Between a worker and PostgreSQL, in another machine of the same site.
_TRIP_SECONDS = 0.0005
#: What a cell has. A classic queue is one process of RabbitMQ, so one core.
_LIMITS = {"cores": 16.0, "sessions": 1000.0, "log": 200e6, "broker": 1.0, "LISTEN": 4.0}
#: Sessions of a process (`database_pool_size`), runs a second of an API process (docs/explanation/performance.md), and
#: notifications a second of a process (leasehold/broker/postgres.py).
_SESSIONS, _RUNS_OF_API, _NOTIFICATIONS = 12, 2000, 200


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell with `workers`. `used`: part of `_LIMITS` -> how much of it is used."""

    workers: int
    outcome: Outcome
    used: Mapping[str, float]

    @property
    def breaks_first(self) -> str:
        return max(_LIMITS, key=self.share)

    def share(self, part: str) -> float:
        return self.used[part] / _LIMITS[part]


def cell(costs: Costs, workers: int, seed: int) -> Cell:
    plan = Plan(
        workers=workers,
        cores=int(_LIMITS["cores"]),
        shared=False,
        slots=_SLOTS,
        task_seconds=_TASK_SECONDS,
        trip_seconds=_TRIP_SECONDS,
    )
    outcome = simulate(costs, plan, seed=seed)
    apis = max(1, ceil(outcome.rate / _RUNS_OF_API))
    notifications = min(outcome.rate, apis * _NOTIFICATIONS)
    used = {
        "cores": outcome.database,
        "sessions": float((workers + apis) * _SESSIONS),
        "log": outcome.rate * costs.log_bytes,
        "broker": outcome.broker,
        "LISTEN": notifications * workers * costs.database_notification,
    }
    return Cell(workers, outcome, used)


def predicted(costs: Costs, workers: int, known: Mapping[str, Any], seed: int) -> float:
    """The jobs a second with which a fleet drains a queue on the machine of `known`, beside other programs."""
    cores, others = known["cores"], known["measured"][str(workers)]["others"]
    plan = Plan(workers, cores, shared=True, backlog=known["jobs"])
    return simulate(costs.slowed(cores / (cores - others)), plan, seed=seed).rate


def comparison(known: Mapping[str, Any], seed: int) -> list[str]:
    costs = Costs.of(known["costs"])
    lines = ["| workers | cores that other programs left | predicted | measured | predicted to measured |"]
    lines.append("|---|---|---|---|---|")
    for workers in FLEETS:
        rate, found = predicted(costs, workers, known, seed), known["measured"][str(workers)]
        left, measured = known["cores"] - found["others"], found["rate"]
        lines.append(
            f"| {workers} | {left:.1f} | {rate:,.0f} jobs/s | {measured:,.0f} jobs/s | {rate / measured:.2f} |"
        )
    return lines


def cells(costs: Costs, seed: int) -> list[str]:
    head = "workers", "cells", "jobs/s", "PostgreSQL's cores", "sessions", "log", "broker", "LISTEN", "breaks first"
    lines = [_row(head), _row(["---"] * len(head))]
    known: dict[int, Cell] = {}
    for workers in _WORKERS:
        for count in _CELLS:
            if count > workers:
                continue
            share = workers // count
            known[share] = known.get(share) or cell(costs, share, seed)
            lines.append(_row(_cells_row(workers, count, known[share])))
    return lines


def _cells_row(workers: int, count: int, one: Cell) -> list[str]:
    first = one.breaks_first
    return [
        f"{workers:,}",
        str(count),
        f"{one.outcome.rate * count:,.0f}",
        f"{one.used['cores']:.1f}",
        f"{one.used['sessions']:,.0f}",
        f"{one.used['log'] / 1e6:.1f} MB/s",
        f"{100 * one.used['broker']:.0f} %",
        f"{one.used['LISTEN']:.2f} cores",
        f"{_NAMES[first]}: {100 * one.share(first):.0f} %",
    ]


_NAMES = {
    "cores": "PostgreSQL's cores",
    "sessions": "sessions",
    "log": "the log",
    "broker": "the broker's queue",
    "LISTEN": "LISTEN",
}


def ends(costs: Costs, seed: int) -> list[str]:
    """Where one PostgreSQL ends, by its cores: as many workers as it takes, tasks that do nothing."""
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
    """The tables, as they stand in PAGE."""
    costs = Costs.of(known["costs"])
    tables = {
        f"`scripts/bench simulate --seed {seed}` prints these tables, from these costs:": costs_of(costs),
        f"Drains of {known['jobs']:,} jobs, all processes on the same {known['cores']} cores:": comparison(known, seed),
        f"Tasks that wait {_TASK_SECONDS:g} s for something else, {_SLOTS} at once in a worker. PostgreSQL has "
        f"{_LIMITS['cores']:.0f} cores. All columns after jobs/s are those of one cell:": cells(costs, seed),
        "Tasks that do nothing, with twice as many workers as PostgreSQL has cores:": ends(costs, seed),
    }
    return "\n\n".join("\n".join([sentence, "", *lines]) for sentence, lines in tables.items()) + "\n"


async def measure(scale: Scale) -> dict[str, Any]:
    async with Testbed() as testbed:
        costs, first = await calibrate(testbed, scale)
        runs = {1: first}
        for workers in FLEETS[1:]:
            runs[workers] = await drain(testbed, scale, Case("amqp", workers, {"broker": "amqp"}))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "jobs": scale.jobs,
        "costs": asdict(costs),
        "measured": {str(n): {"rate": run.rate, "others": run.meter.others_cores} for n, run in runs.items()},
    }


def write(text: str) -> None:
    """Put the tables between the marks of PAGE."""
    before, begin, rest = PAGE.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise SystemExit(f"{PAGE.name} has no marks for the tables")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench simulate", description=__doc__)
    parser.add_argument("--measure", action="store_true", help=f"calibrate first, and write {COSTS.name}")
    parser.add_argument("--jobs", type=int, default=Scale().jobs, help="jobs of each drain (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}, too")
    options = parser.parse_args(arguments)
    if options.measure:
        known = asyncio.run(measure(replace(Scale(), jobs=options.jobs)))
        COSTS.write_bytes(orjson.dumps(known, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    text = page(orjson.loads(COSTS.read_bytes()), options.seed)
    sys.stdout.write(text)
    if options.write:
        write(text)
    return 0
