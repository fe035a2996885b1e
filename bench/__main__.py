"""`scripts/bench [FIGURE ...] [--json FILE] [--record MACHINE]`: measures figures, prints them, and records them.
`scripts/bench simulate` runs another program (simulate.py).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench import (
    burst,
    conversion,
    fleet,
    generation,
    growth,
    idle,
    image,
    latency,
    machine,
    metrics_cost,
    migrations,
    operations,
    page,
    pictures,
    plot,
    recovery,
    report,
    runs,
    sdk,
    simulate,
    snapshot,
    start,
    steady,
    submit,
    surface,
    tables,
    throughput,
    waiting,
    workflows,
    writes,
)
from bench import (
    console as console_pages,
)
from bench.figure import Figure
from bench.hostile import measure as hostile
from bench.hostile.attacks import ATTACKS
from bench.peers import delays
from bench.peers import measure as peers
from bench.scale import Scale
from bench.testbed import Testbed
from leasehold.embedded.process import EmbeddedError
from leasehold.runtime.garbage import freeze_loaded

FIGURES: Mapping[str, Callable[[Testbed, Scale], Awaitable[list[Figure]]]] = {
    "throughput": throughput.measure,
    "burst": burst.measure,
    "writes": writes.measure,
    "fleet": fleet.measure,
    "workflows": workflows.measure,
    "latency": latency.measure,
    "growth": growth.measure,
    "image": image.measure,
    "idle": idle.measure,
    "start": start.measure,
    "submit": submit.measure,
    "waiting": waiting.measure,
    "conversion": conversion.measure,
    "generation": generation.measure,
    "metrics": metrics_cost.measure,
    "migrations": migrations.measure,
    "runs": runs.measure,
    "snapshot": snapshot.measure,
    "tables": tables.measure,
    "surface": surface.measure,
    "console": console_pages.measure,
    "operations": operations.measure,
    "steady": steady.measure,
    "recovery": recovery.measure,
    "peers": peers.measure,
    "delays": delays.measure,
    "pictures": pictures.measure,
    "sdk": sdk.measure,
    "hostile": hostile.measure,
}
#: These run only if the command names them: they install other packages, or take at least a quarter of an hour.
ONLY_BY_NAME = {
    "peers",
    "delays",
    "pictures",
    "steady",
    "tables",
    "surface",
    "console",
    "operations",
    "sdk",
    "hostile",
    "migrations",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure the platform on private servers with full durability. Every figure is the median of "
        "several runs; the column `load` shows how busy the machine was before.",
    )
    parser.add_argument(
        "figures", nargs="*", metavar="FIGURE", help=f"any of {', '.join(FIGURES)}; none: the usual ones"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument(
        "--record", metavar="MACHINE", help="write the figures into the docs, with this letter for the machine"
    )
    parser.add_argument(
        "--page", action="store_true", help="measure nothing: mark the rows that are older than their code"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into this file (.svg or .png)")
    parser.add_argument("--runs", type=int, default=Scale().runs, help="runs of each figure (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=Scale().jobs, help="jobs of one throughput run (%(default)s)")
    parser.add_argument("--peers", default=",".join(Scale().peers), help="of peers and delays (%(default)s)")
    parser.add_argument(
        "--finished", default=",".join(map(str, Scale().finished)), help="jobs in the table, of growth (%(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=Scale().steady_minutes, help="of steady (%(default)s)")
    parser.add_argument(
        "--rate", type=float, default=Scale().steady_rate, help="jobs a second, of steady (%(default)s)"
    )
    parser.add_argument("--attacks", default="", help=f"of hostile, comma-separated; all of {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=Scale().hostile_seconds, help="of each attack (%(default)s)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in _names(options.attacks) if name not in ATTACKS]:
        parser.error(f"no such attack: {', '.join(unknown)}")
    if unknown := [name for name in options.figures if name not in FIGURES]:
        parser.error(f"no such figure: {', '.join(unknown)}")
    return options


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


async def measure(
    names: Sequence[str], scale: Scale, console: Console
) -> tuple[dict[str, object], dict[str, list[Figure]]]:
    """Measure the figures. Returns the description of the machine, and the figures by name."""
    async with Testbed() as testbed:
        machine_description = machine.describe() | {"servers": await testbed.servers()}
        figures: dict[str, list[Figure]] = {}
        for name in names:
            console.print(f"measuring {name} ...", style="dim")
            figures[name] = await FIGURES[name](testbed, scale)
        return machine_description, figures


async def run(options: argparse.Namespace) -> None:
    scale = replace(
        Scale(),
        runs=options.runs,
        jobs=options.jobs,
        peers=tuple(options.peers.split(",")),
        steady_minutes=options.minutes,
        steady_rate=options.rate,
        attacks=_names(options.attacks),
        hostile_seconds=options.seconds,
        finished=tuple(int(count) for count in options.finished.split(",")),
    )
    names = options.figures or [name for name in FIGURES if name not in ONLY_BY_NAME]
    machine_description, by_name = await measure(names, scale, Console(stderr=True))
    figures = [figure for measured in by_name.values() for figure in measured]
    report.show(Console(), machine_description, figures)
    if options.json is not None:
        await asyncio.to_thread(report.write, options.json, machine_description, figures)
    if options.record is not None:
        sizes = (("runs", scale.runs, Scale().runs), ("finished", scale.finished, Scale().finished))
        chosen = "".join(f" --{name} {getattr(options, name)}" for name, value, usual in sizes if value != usual)
        for name, measured in by_name.items():
            await asyncio.to_thread(page.record, measured, f"scripts/bench {name}{chosen}", options.record)
    if options.plot is not None:
        await asyncio.to_thread(plot.draw, options.plot, figures)


def main() -> int:
    if sys.argv[1:2] == ["simulate"]:
        return simulate.main(sys.argv[2:])
    freeze_loaded()  # as the platform's processes do: pauses of the bench's own collector must be in no figure
    options = parse()
    if options.page:
        page.render(page.has_changed)
        return 0
    try:
        asyncio.run(run(options))
    except EmbeddedError as error:
        Console(stderr=True).print(error, markup=False)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
