"""`growth`: the time of a claim of sixteen tasks by hint, beside many finished jobs. Completions come in turns."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter

from bench.by_hand import complete, fill, pending, terms
from bench.figure import Curve, Figure, Goal, quantile
from bench.finished import grow
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.db.database import connect
from leasehold.transitions import claims

_BATCH = 16
_WARM = 20  # claims that are not counted
_GOAL = Goal(1.2)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    """Measure each size in a database of its own. The databases are filled once, then measured in turns."""
    runs_by_size: dict[int, list[list[float]]] = {finished: [] for finished in scale.finished}
    load = []
    async with AsyncExitStack() as opened:
        installations = {finished: await _filled(testbed, finished, opened) for finished in scale.finished}
        for _ in range(scale.runs):
            load.append(os.getloadavg()[0])
            for finished, installation in installations.items():
                runs_by_size[finished].append(await _claims_ms(testbed, installation, scale.claims + _WARM))
    figures = [_figure(finished, runs, tuple(load)) for finished, runs in runs_by_size.items()]
    smallest, *larger = figures
    return [*figures, *(_ratio(figure, smallest) for figure in larger)]


def _figure(finished: int, runs: list[list[float]], load: tuple[float, ...]) -> Figure:
    worst = tuple(quantile(run, 0.99) for run in runs)
    curve = Curve(f"a claim of {_BATCH}, p99", "ms", "finished jobs beside", ((finished, median(worst)),))
    return Figure(f"a claim of {_BATCH} beside {finished:,} finished jobs, p99", "ms", worst, load, curve=curve)


def _ratio(larger: Figure, smallest: Figure) -> Figure:
    ratios = tuple(a / b for a, b in zip(larger.runs, smallest.runs, strict=True))
    return Figure(f"{larger.name}, to the first", "ratio", ratios, larger.load, _GOAL)


async def _filled(testbed: Testbed, finished: int, opened: AsyncExitStack) -> Installation:
    """An installation with `finished` finished jobs."""
    installation = await opened.enter_async_context(testbed.installation(broker="postgres"))
    await grow(installation, finished)
    return installation


async def _claims_ms(testbed: Testbed, installation: Installation, rounds: int) -> list[float]:
    await fill(installation, rounds * _BATCH)
    await testbed.checkpoint()
    connection = await connect(installation.settings, "bench")
    try:
        lease_terms, milliseconds = terms(), []
        for tasks in await pending(connection, _BATCH):
            began = perf_counter()
            claimed = await claims.claim(connection, lease_terms, tasks)
            milliseconds.append(1000 * (perf_counter() - began))
            await complete(connection, claimed)
    finally:
        await connection.close()
    return milliseconds[_WARM:]
