"""`tables`: what the storage options and the indexes of the busy tables save. Each choice is compared with its
alternative.

Each choice has an installation with finished jobs. In all installations at once, and at the same pace, jobs are
submitted, polled for, renewed once and completed. This lasts for some minutes, because autovacuum comes once a minute.
The figures are PostgreSQL's own counters, which other work on the machine does not change. They count the pages that a
vacuum touches, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import asyncpg

from bench.by_hand import complete, terms
from bench.figure import Figure
from bench.finished import grow
from bench.scale import Scale
from bench.submitter import submitter
from bench.testbed import Installation, Testbed
from leasehold.db.database import connect
from leasehold.pipelines.demo.pipeline import noop
from leasehold.transitions import claims
from leasehold.worker.claiming.polls import Polls
from leasehold.worker.claiming.shares import Rooms

_BATCH = 16
_BATCHES_A_SECOND = 4
_COUNTED_SECONDS = 2.0  # until the counters include the work of a session that has ended

#: The alternatives, by their names.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "as migrated": (),
    "pages filled up": ("ALTER TABLE task SET (fillfactor = 100)", "ALTER TABLE job SET (fillfactor = 100)"),
    "PostgreSQL's own autovacuum": tuple(
        f"ALTER TABLE {name} RESET (autovacuum_vacuum_scale_factor, autovacuum_vacuum_threshold,"
        " autovacuum_vacuum_cost_delay)"
        for name in ("task", "outbox")
    ),
    "an index of when leases end": ("CREATE INDEX ON task (lease_until) WHERE status = 'running'",),
    "what can run, in an index of all tasks": (
        "DROP INDEX task_runnable",
        "CREATE INDEX ON task (queue, priority, tenant_id, available_at)",
    ),
    "an index of jobs by status": ("CREATE INDEX ON job (tenant_id, status, id DESC)",),
}

_COUNTERS = """
SELECT (SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()) AS pages,
       pg_total_relation_size('task') + pg_total_relation_size('job') AS bytes,
       t.n_tup_upd AS of_task, t.n_tup_hot_upd AS of_task_heap_only,
       j.n_tup_upd AS of_job, j.n_tup_hot_upd AS of_job_heap_only
FROM pg_stat_user_tables t CROSS JOIN pg_stat_user_tables j WHERE t.relname = 'task' AND j.relname = 'job'
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """The measurements of one run."""

    pages: float  # a job
    bytes: float  # a job
    task_heap_only: float  # percent of the updates
    job_heap_only: float


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    runs_by_choice: dict[str, list[_Run]] = {choice: [] for choice in CHOICES}
    load = []
    for _ in range(scale.runs):
        load.append(os.getloadavg()[0])
        async with AsyncExitStack() as opened:
            installations = {}
            for choice, statements in CHOICES.items():
                installations[choice] = await opened.enter_async_context(testbed.installation(broker="postgres"))
                await _prepare(installations[choice], statements, scale.finished_beside)
            await testbed.checkpoint()
            runs = await asyncio.gather(
                *(_run(installation, scale.choice_minutes) for installation in installations.values())
            )
            for choice, run in zip(installations, runs, strict=True):
                runs_by_choice[choice].append(run)
    return [figure for choice, runs in runs_by_choice.items() for figure in _figures(choice, runs, tuple(load))]


def _figures(choice: str, runs: list[_Run], load: tuple[float, ...]) -> list[Figure]:
    return [
        Figure(f"tables, {choice}, {what}", unit, values, load)
        for what, unit, values in (
            ("touched a job", "pages", tuple(run.pages for run in runs)),
            ("task and job grow a job by", "bytes", tuple(run.bytes for run in runs)),
            ("updates of task that are heap-only", "%", tuple(run.task_heap_only for run in runs)),
            ("updates of job that are heap-only", "%", tuple(run.job_heap_only for run in runs)),
        )
    ]


async def _prepare(installation: Installation, statements: tuple[str, ...], finished: int) -> None:
    async with installation.connection() as connection:
        for statement in statements:
            await connection.execute(statement)
    await grow(installation, finished)


async def _run(installation: Installation, minutes: float) -> _Run:
    batches = round(60 * minutes * _BATCHES_A_SECOND)
    before = await _counters(installation)
    await _work(installation, batches)
    after = await _counters(installation)
    jobs = batches * _BATCH

    def difference(name: str) -> int:
        return int(after[name] - before[name])

    return _Run(
        pages=difference("pages") / jobs,
        bytes=difference("bytes") / jobs,
        task_heap_only=100 * difference("of_task_heap_only") / difference("of_task"),
        job_heap_only=100 * difference("of_job_heap_only") / difference("of_job"),
    )


async def _counters(installation: Installation) -> asyncpg.Record:
    await asyncio.sleep(_COUNTED_SECONDS)
    async with installation.connection() as connection:
        row = await connection.fetchrow(_COUNTERS)
    assert row is not None
    return row


async def _work(installation: Installation, batches: int) -> None:
    loop = asyncio.get_running_loop()
    lease_terms, polls = terms(), Polls()
    connection = await connect(installation.settings, "bench")
    try:
        async with submitter(installation) as submitting:
            began = loop.time()
            for number in range(batches):
                await asyncio.sleep(began + number / _BATCHES_A_SECOND - loop.time())
                await submitting.fill(noop, _BATCH)
                claimed = (await polls.claim(connection, lease_terms, ["default"], _BATCH, 0.0, Rooms())).claimed
                if len(claimed) != _BATCH:
                    raise RuntimeError(f"a poll found {len(claimed)} of {_BATCH}")
                await claims.renew(connection, lease_terms.owner, [claim.lease for claim in claimed], lease_terms.ttl)
                await complete(connection, claimed)
    finally:
        await connection.close()
