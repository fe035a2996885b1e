"""`snapshot`: the time of claims and completions while a session holds an old snapshot: vacuum then removes no dead
row.

It is measured first in an empty database, then after many jobs have been done under that snapshot.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter

from bench.by_hand import complete, fill, pending, terms
from bench.figure import Figure, Goal
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.db.database import Connection, connect
from leasehold.transitions import claims
from leasehold.worker.claiming.polls import Polls
from leasehold.worker.claiming.shares import Rooms

_BATCH = 16
_MEASURED = 2 * 60 * _BATCH  # tasks of one measurement: polls claim half of them, hints the other half
_AT_ONCE = 64
_GOAL = Goal(1.2)
_KINDS = ("a look", "a claim by hint", "a completion")


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    ratios: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    milliseconds: dict[str, list[list[float]]] = {kind: [] for kind in _KINDS}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        before, after = await _run(testbed, scale.under_snapshot)
        for kind in _KINDS:
            ratios[kind].append(after[kind] / before[kind])
            milliseconds[kind].append([round(before[kind], 2), round(after[kind], 2)])
    return [
        Figure(
            f"{kind} of {_BATCH} after {scale.under_snapshot:,} jobs under an old snapshot, to before, p50", "ratio",
            tuple(ratios[kind]), tuple(load), _GOAL, {"ms_before_and_after": milliseconds[kind]},
        )
        for kind in _KINDS
    ]  # fmt: skip


async def _run(testbed: Testbed, jobs: int) -> tuple[dict[str, float], dict[str, float]]:
    async with testbed.installation(broker="postgres") as installation, AsyncExitStack() as opened:
        connection = await connect(installation.settings, "bench")
        opened.push_async_callback(connection.close)
        holder = await opened.enter_async_context(installation.connection())
        await opened.enter_async_context(holder.transaction(isolation="repeatable_read", readonly=True))
        await holder.fetchval("SELECT count(*) FROM job")
        await _median_ms(installation, connection)  # a warm-up
        before = await _median_ms(installation, connection)
        await fill(installation, jobs)
        for tasks in await pending(connection, _AT_ONCE):
            await complete(connection, await claims.claim(connection, terms(), tasks))
        await testbed.checkpoint()
        return before, await _median_ms(installation, connection)


async def _median_ms(installation: Installation, connection: Connection) -> dict[str, float]:
    """The milliseconds of each kind of statement."""
    await fill(installation, _MEASURED)
    spent: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    polls = Polls()
    for _ in range(_MEASURED // _BATCH // 2):
        began = perf_counter()
        polled = await polls.claim(connection, terms(), ["default"], _BATCH, 0.0, Rooms())
        spent["a look"].append(perf_counter() - began)
        await complete(connection, polled.claimed)
    for tasks in await pending(connection, _BATCH):
        began = perf_counter()
        claimed = await claims.claim(connection, terms(), tasks)
        spent["a claim by hint"].append(perf_counter() - began)
        began = perf_counter()
        await complete(connection, claimed)
        spent["a completion"].append(perf_counter() - began)
    return {kind: 1000 * median(times) for kind, times in spent.items()}
