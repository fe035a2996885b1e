"""`writes`: what the life of a job writes, by phase: submit, announce, claim and settle.

The bench does one phase after the other, on one connection and without a worker, so every count belongs to its phase.
The counts are PostgreSQL's own: other work on the machine does not change them. No checkpoint begins meanwhile, so
PostgreSQL writes almost no whole pages; `throughput` counts these in its drains.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

import asyncpg

from bench.by_hand import complete, pending, terms
from bench.figure import Figure, Goal
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.broker import outbox
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, connect
from leasehold.pipelines.demo.pipeline import noop
from leasehold.transitions import claims
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import NewJob, submit

PHASES = ("submit", "announce", "claim", "settle")
#: Jobs of one statement: about as many as a busy worker claims and settles at once.
_BATCH = 32
_WARM = 4  # batches before the counted ones: they prepare the session's statements and fill its caches
_GOAL = Goal(1536)

# `pages`: the buffers that sessions found in memory or read. PostgreSQL counts flushes of the log in pg_stat_io.
_COUNTERS = """
SELECT w.wal_bytes::float8 AS wal_bytes, w.wal_records AS wal_records, w.wal_fpi AS wal_images,
       (SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal') AS flushes,
       d.xact_commit AS commits, d.blks_hit + d.blks_read AS pages,
       u.updates, u.heap_only
FROM pg_stat_wal w, pg_stat_database d,
     (SELECT sum(n_tup_upd) AS updates, sum(n_tup_hot_upd) AS heap_only FROM pg_stat_user_tables) AS u
WHERE d.datname = current_database()
"""
#: A session counts for itself, and publishes its counts once a second, or when this statement asks for it.
_PUBLISH = "SELECT pg_stat_force_next_flush()"


@dataclass(frozen=True, slots=True)
class Writes:
    """What was written. `wal_bytes` includes `wal_images` whole pages of up to 8 kB each."""

    wal_bytes: float
    wal_records: float
    wal_images: float
    flushes: float
    commits: float
    pages: float  # pages touched in memory
    updates: float  # rows updated
    heap_only: float  # of these, without an entry in an index

    @classmethod
    async def so_far(cls, connection: Connection | asyncpg.Connection[asyncpg.Record]) -> Self:
        """The present counters: `commits`, `pages` and the updates of this database, the others of the whole server."""
        await connection.execute(_PUBLISH)
        row = await connection.fetchrow(_COUNTERS)
        assert row is not None
        return cls(**{name: float(value) for name, value in row.items()})

    def since(self, before: Self, jobs: int) -> Writes:
        """What was written since `before`, divided by `jobs`."""
        earlier = asdict(before)
        return Writes(**{name: (value - earlier[name]) / jobs for name, value in asdict(self).items()})

    def as_details(self) -> dict[str, float]:
        """Rounded, with the share of heap-only updates in percent."""
        numbers = {field.name: round(getattr(self, field.name), 3) for field in fields(self)}
        del numbers["heap_only"]
        return numbers | {"heap_only_percent": round(100 * self.heap_only / self.updates, 1) if self.updates else 0.0}


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    runs: list[dict[str, Writes]] = []
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with testbed.installation(broker="postgres") as installation:
            await testbed.checkpoint()
            runs.append(await by_phase(installation, scale.jobs))
    figures = [
        Figure(
            f"WAL of a job, {phase}",
            "bytes",
            tuple(run[phase].wal_bytes for run in runs),
            tuple(load),
            details={"a_job": [run[phase].as_details() for run in runs]},
        )
        for phase in PHASES
    ]
    whole = tuple(sum(run[phase].wal_bytes for phase in PHASES) for run in runs)
    return [*figures, Figure("WAL of a job, its whole life", "bytes", whole, tuple(load), _GOAL)]


async def by_phase(installation: Installation, jobs: int) -> dict[str, Writes]:
    """What a job of one step writes in each phase. All `jobs` jobs go through a phase before the next phase begins."""
    connection = await connect(installation.settings, "bench")
    try:
        # These jobs are not counted: they prepare the statements and fill the caches.
        await _go_through(connection, _WARM * _BATCH, {})
        written: dict[str, Writes] = {}
        await _go_through(connection, max(_BATCH, jobs // _BATCH * _BATCH), written)
        return written
    finally:
        await connection.close()


async def _go_through(connection: Connection, jobs: int, written: dict[str, Writes]) -> None:
    """Take `jobs` jobs through all phases. Put what each phase wrote into `written`."""
    hints: list[list[Announcement]] = []
    claimed: list[list[Claimed]] = []
    lease_terms = terms()

    async def submitting(_batch: int) -> None:
        hints.append(await submit(connection, [NewJob(noop, "bench") for _ in range(_BATCH)]))

    async def announcing(batch: int) -> None:
        await outbox.delete_confirmed(connection, hints[batch])

    async def claiming(batch: int) -> None:
        claimed.append(await claims.claim(connection, lease_terms, due[batch]))

    async def settling(batch: int) -> None:
        await complete(connection, claimed[batch])

    async def phase(name: str, work: Callable[[int], Awaitable[None]]) -> None:
        before = await Writes.so_far(connection)
        for batch in range(jobs // _BATCH):
            await work(batch)
        written[name] = (await Writes.so_far(connection)).since(before, jobs)

    await phase("submit", submitting)
    await phase("announce", announcing)
    due = await pending(connection, _BATCH)
    await phase("claim", claiming)
    _check(claimed, jobs)
    await phase("settle", settling)


def _check(claimed: Sequence[Sequence[Claimed]], jobs: int) -> None:
    if (count := sum(map(len, claimed))) != jobs:
        raise RuntimeError(f"{count} of {jobs} tasks were claimed")
