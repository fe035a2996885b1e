"""`surface`: the database's time for a page of `GET /v1/jobs`, by each documented filter, beside many jobs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from time import perf_counter
from typing import Any

import orjson
from cryptography.fernet import Fernet

from bench.figure import Figure, Goal, quantile
from bench.scale import Scale
from bench.testbed import Installation, Testbed
from leasehold.db import job_lists
from leasehold.db.database import Connection, connect, in_index_order
from leasehold.db.job_lists import MAX_READ, Listing, Scope, listing_of_page
from leasehold.domain.job_filter import parse

_GOAL_MS, _GOAL_ROWS = Goal(100.0), Goal(5000)
_PAGE, _TIMES = 50, 20
_KINDS = ("conversion", "generation", "media", "webhook")
_SCOPE = Scope("acme", _KINDS, runs=True, others=("noop",), owned=_KINDS)
_SCHEDULE = "00000000-0000-7000-8000-000000000001"
#: A filter of each documented sort; then some that find few jobs or none, which read most.
FILTERS = (
    "", "kind:media", "kind:run", "kind:media status:failed", "status:running", "status:cancelled", "status:succeeded",
    "template:report7", "template:report7 status:failed", "code:code3", "tag.customer:7",
    "tag.customer:7 status:failed", "created:<1h", "created:>2h", "queue:mail", "waited:>10m", "duration:>5m",
    "worker:00000000-0000-7000-8000-000000000002", f"schedule:{_SCHEDULE}", "payload./n:7", "timeout",
    "queue:nowhere created:<1h", "payload./n:-1", "nowhere", "queue:nowhere", "waited:>9h",
)  # fmt: skip

# $1: the number of jobs, made over thirty days. Of ten jobs, four are runs of a hundred templates, four are pictures,
# one is a conversion, and one is a generation. One job in a hundred has failed; one in ten has a tag. Each id is the
# UUIDv7 of the time at which the job was made.
_FILL = (
    """
    CREATE TEMPORARY TABLE made AS
    SELECT g, (lpad(to_hex((extract(epoch FROM at) * 1000)::bigint), 12, '0') || '70008000' || lpad(to_hex(g), 12, '0')
              )::uuid AS id, at, g % 100 = 0 AS failed, g % 1000 = 1 AS live, g % 1000 = 2 AS cancelled,
           CASE WHEN g % 10 < 4 THEN 'report' || (g / 10) % 100 WHEN g % 10 < 8 THEN 'media'
                WHEN g % 10 = 8 THEN 'conversion' ELSE 'generation' END AS pipeline
    FROM (SELECT g, clock_timestamp() - (($1 - g) * 2592000.0 / $1) * interval '1 second' AS at
          FROM generate_series(1, $1::int) AS g) AS n
    """,
    """
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq, params, inputs,
                     output_prefix, error, cancel, created_at, started_at, finished_at)
    SELECT id, 'acme', pipeline, 1,
           CASE WHEN live THEN 'running' WHEN failed THEN 'failed' WHEN cancelled THEN 'cancelled' ELSE 'succeeded' END,
           0, 1, jsonb_build_object('n', g), '{}', 'jobs/' || id,
           CASE WHEN failed AND NOT live THEN jsonb_build_object('code', 'code' || (g / 100) % 20, 'message', 'timeout',
                                                    'retryable', false) END,
           CASE WHEN cancelled THEN '{"reason": "", "by": "bench"}'::jsonb END,
           at, at + interval '1 second', CASE WHEN NOT live THEN at + interval '10 seconds' END
    FROM made
    """,
    f"""
    INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id, schedule_id)
    SELECT id, 'acme', pipeline, 1, 'tenant', '', CASE WHEN g % 100 = 3 THEN '{_SCHEDULE}'::uuid END
    FROM made WHERE starts_with(pipeline, 'report')
    """,
    """
    INSERT INTO job_tag (job_id, name, tenant_id, value)
    SELECT id, 'customer', 'acme', ((g / 10) % 1000)::text FROM made WHERE g % 10 = 0
    """,
    """
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, max_attempts, finished_at)
    SELECT id, id, 'acme', 'only', 0, CASE WHEN g % 5 = 0 THEN 'mail' ELSE 'media' END, 1,
           CASE WHEN live THEN 'pending' WHEN failed THEN 'failed' WHEN cancelled THEN 'cancelled'
                ELSE 'succeeded' END, 1, CASE WHEN NOT live THEN at END
    FROM made
    """,
    """
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable, at)
    SELECT id, 1, 'error', 'code' || (g / 100) % 20, 'timeout', false, at FROM made WHERE failed AND NOT live
    """,
    "DROP TABLE made",
    "VACUUM ANALYZE job, run, job_tag, task, failure",
)


async def measure(testbed: Testbed, scale: Scale) -> list[Figure]:
    jobs = max(scale.finished)
    figures: list[Figure] = []
    installation = await filled(testbed, jobs)
    connection = await connect(installation.settings, "bench")
    try:
        for text in FILTERS:
            figures += await _figures(connection, text, jobs, scale.runs)
    finally:
        await connection.close()
    return figures


async def filled(testbed: Testbed, jobs: int) -> Installation:
    """An installation with `jobs` jobs. `surface` and `console` share it."""
    keys = Fernet.generate_key().decode()
    return await testbed.filled("jobs", partial(_fill, jobs=jobs), broker="postgres", sealing_keys=keys)


async def _fill(installation: Installation, jobs: int) -> None:
    """Write `jobs` jobs, as `_FILL` describes."""
    async with installation.connection() as connection:
        first, *others = _FILL
        await connection.execute(first.replace("$1", str(jobs)))
        for statement in others:
            await connection.execute(statement)


async def _figures(connection: Connection, text: str, jobs: int, runs: int) -> list[Figure]:
    load, worst, last = [], [], None
    for _ in range(runs):
        load.append(os.getloadavg()[0])
        spent = []
        for _ in range(_TIMES):
            began = perf_counter()
            last = await job_lists.page(connection, _listing(text), _PAGE)
            spent.append(1000 * (perf_counter() - began))
        worst.append(quantile(spent, 0.95))
    assert last is not None
    rows = await rows_read(connection, _listing(text))
    # A walk that was cut at MAX_READ must only keep that bound. A walk by queue must keep the bound of all pages.
    was_cut = last.ended_at is not None and parse(text, datetime.now(UTC)).queue is None
    name = f"a page of `{text or 'no filter'}` beside {jobs:,} jobs"
    details = {"jobs on the page": len(last.rows), "walk ended": last.ended_at is not None}
    return [
        Figure(f"{name}, p95", "ms", tuple(worst), tuple(load), None if was_cut else _GOAL_MS, details),
        Figure(
            f"{name}, rows read", "rows", (float(rows),), tuple(load[:1]), Goal(MAX_READ) if was_cut else _GOAL_ROWS
        ),
    ]


def _listing(text: str) -> Listing:
    return listing_of_page(_SCOPE, parse(text, datetime.now(UTC)))


async def rows_read(connection: Connection, listing: Listing) -> int:
    """The rows that the page's statement reads in tables and indexes, also those that a condition drops. PostgreSQL
    plans the statement without its values, as it does for a page.
    """
    statement = (await job_lists.narrowed_to_text(connection, listing)).page(_PAGE)
    values = ", ".join(await job_lists.literals(connection, statement))
    await connection.execute(f"PREPARE page AS {statement.text}")
    try:
        async with in_index_order(connection):
            explained = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE page({values})")
    finally:
        await connection.execute("DEALLOCATE page")
    (plan,) = orjson.loads(explained) if isinstance(explained, str) else explained
    return _read(plan["Plan"])


def _read(node: Mapping[str, Any]) -> int:
    own = 0
    if "Relation Name" in node:
        dropped = sum(node.get(f"Rows Removed by {why}", 0) for why in ("Filter", "Index Recheck"))
        own = round((node["Actual Rows"] + dropped) * node["Actual Loops"])
    return own + sum(_read(child) for child in node.get("Plans", ()))
