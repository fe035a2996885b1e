"""`scripts/bench simulate`: predicts what fleets and cells do that are too large for one machine, and what breaks
first.

`--measure` calibrates the model with one worker, then measures fleets of 1 to 8 workers on the same machine. Nobody
need believe the model about a thousand workers unless it predicts these fleets. `--measure` writes costs and
measurements to COSTS. Without it, the command reads them there. `--write` puts the tables into PAGE.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

from bench.calibration import FEW_SLOTS, calibrate
from bench.scale import Scale
from bench.simulation_tables import FLEETS, page
from bench.testbed import Testbed
from bench.throughput import Case, Run, drain

COSTS = Path(__file__).with_name("costs.json")
PAGE = Path(__file__).parents[1] / "docs/operations/scale.md"
_BEGIN, _END = "<!-- simulation: begin -->\n", "<!-- simulation: end -->\n"


async def measure(scale: Scale) -> dict[str, Any]:
    """Calibrate, and measure the fleets in turns, so that a change of the machine's load falls on all of them."""
    runs: dict[int, list[Run]] = {workers: [] for workers in FLEETS}
    few: list[Run] = []
    async with Testbed() as testbed:
        for _ in range(scale.runs):
            for workers in FLEETS:
                runs[workers].append(await drain(testbed, scale, Case("amqp", workers, {"broker": "amqp"})))
            few.append(await drain(testbed, scale, FEW_SLOTS))
        middle = {workers: _middle(of) for workers, of in runs.items()}
        costs = await calibrate(testbed, scale, middle[1], _middle(few))
    return {
        "cores": len(os.sched_getaffinity(0)),
        "jobs": scale.jobs,
        "costs": asdict(costs),
        "measured": {str(workers): _record(run, scale) for workers, run in middle.items()},
        "few": _record(_middle(few), scale),
        "all_rates": {str(workers): [round(run.rate) for run in of] for workers, of in runs.items()},
    }


def _middle(runs: list[Run]) -> Run:
    """The run of the middle rate."""
    return sorted(runs, key=lambda run: run.rate)[len(runs) // 2]


def _record(run: Run, scale: Scale) -> dict[str, Any]:
    cpu = {role: seconds / scale.jobs for role, seconds in run.meter.by_role.items()}
    return {"rate": run.rate, "others": run.meter.others_cores, "cpu": cpu, "statements": run.statements,
            "claims": run.claims, "commits": run.writes.commits, "load": run.load}  # fmt: skip


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
    parser.add_argument("--runs", type=int, default=Scale().runs, help="drains of each fleet (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}, too")
    options = parser.parse_args(arguments)
    if options.measure:
        known = asyncio.run(measure(replace(Scale(), jobs=options.jobs, runs=options.runs)))
        COSTS.write_bytes(orjson.dumps(known, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    text = page(orjson.loads(COSTS.read_bytes()), options.seed)
    sys.stdout.write(text)
    if options.write:
        write(text)
    return 0
