"""Reads the lines and chunks that the attempts of a job have logged and emitted. Each read is one statement.

Every query names the tenant. Exception: `log_numbers` and `stream_numbers`. Their callers have already found each job
through its tenant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection

#: `log_numbers` and `stream_numbers` return this number for a job that has ended: no line or chunk follows.
ENDED = 2**62

# A row of job_log holds `n` lines as a JSON array. The last of them has the number `last` in its job. A page of N lines
# reads at most N rows.
LOG_PAGE = """
-- log_page
SELECT c.last - c.n AS before, c.step, c.epoch, c.attempt, c.lines
FROM job_log c
WHERE c.job_id = $1 AND c.tenant_id = $2 AND c.last > $3
  AND ($4::text IS NULL OR c.step = $4) AND ($5::int IS NULL OR c.attempt = $5)
ORDER BY c.last LIMIT $6
"""

LOG_NUMBERS = """
-- log_numbers
SELECT j.id, CASE WHEN j.finished_at IS NULL THEN coalesce(o.log_seq, 0) ELSE $2::bigint END AS number
FROM job j LEFT JOIN tail o ON o.job_id = j.id WHERE j.id = ANY($1::uuid[])
"""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The step and the attempt whose lines or chunks are read. `attempt`: counted from 1. None: any."""

    step: str | None = None
    attempt: int | None = None


async def log_page(
    connection: Connection, tenant_id: str, job_id: UUID, after: int, log_filter: LogFilter, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` lines numbered above `after`, in their order."""
    rows = await connection.fetch(LOG_PAGE, job_id, tenant_id, after, log_filter.step, log_filter.attempt, limit)
    lines = (
        {"n": row["before"] + nth, "step": row["step"], "attempt": row["attempt"], "epoch": row["epoch"]} | line
        for row in rows
        for nth, line in enumerate(row["lines"], 1)
        if row["before"] + nth > after
    )
    return list(islice(lines, limit))


LOG_END = """
-- log_end
SELECT c.last - c.n AS before, c.step, c.epoch, c.attempt, c.lines
FROM job_log c WHERE c.job_id = $1 AND c.tenant_id = $2 ORDER BY c.last DESC LIMIT $3
"""


async def log_end(connection: Connection, tenant_id: str, job_id: UUID, limit: int) -> list[dict[str, Any]]:
    """The last `limit` lines, in their order."""
    rows = await connection.fetch(LOG_END, job_id, tenant_id, limit)
    lines = [
        {"n": row["before"] + nth, "step": row["step"], "attempt": row["attempt"], "epoch": row["epoch"]} | line
        for row in reversed(rows)
        for nth, line in enumerate(row["lines"], 1)
    ]
    return lines[-limit:]


async def log_numbers(connection: Connection, job_ids: Iterable[UUID]) -> dict[UUID, int]:
    """By job: the number of its last line, or ENDED if the job has ended. Deleted jobs are absent."""
    rows = await connection.fetch(LOG_NUMBERS, list(job_ids), ENDED)
    return {row["id"]: row["number"] for row in rows}


# `superseded`: a later attempt of the step has started the stream anew.
STREAM_PAGE = """
-- stream_page
SELECT c.last - c.n AS before, c.step, c.epoch, c.attempt, c.restarts AND c.first = 1 AS restarts, c.chunks, c.at,
       EXISTS (SELECT 1 FROM job_stream o WHERE o.task_id = c.task_id AND o.epoch > c.epoch AND o.restarts)
       AS superseded
FROM job_stream c
WHERE c.job_id = $1 AND c.tenant_id = $2 AND c.last > $3 AND ($4::text IS NULL OR c.step = $4)
  AND ($5::int IS NULL OR c.attempt = $5)
ORDER BY c.last LIMIT $6
"""

# As STREAM_PAGE, from the end.
STREAM_END = """
-- stream_end
SELECT c.step, c.chunks
FROM job_stream c
WHERE c.job_id = $1 AND c.tenant_id = $2
  AND NOT EXISTS (SELECT 1 FROM job_stream o WHERE o.task_id = c.task_id AND o.epoch > c.epoch AND o.restarts)
ORDER BY c.last DESC LIMIT $3
"""


async def stream_end(connection: Connection, tenant_id: str, job_id: UUID, limit: int) -> list[dict[str, Any]]:
    """The last `limit` chunks that count, in their order, each with its `step`."""
    rows = await connection.fetch(STREAM_END, job_id, tenant_id, limit)
    return [{"step": row["step"]} | chunk for row in reversed(rows) for chunk in row["chunks"]][-limit:]


STREAM_NUMBERS = """
-- stream_numbers
SELECT j.id, CASE WHEN j.finished_at IS NULL THEN coalesce(o.stream_seq, 0) ELSE $2::bigint END AS number
FROM job j LEFT JOIN tail o ON o.job_id = j.id WHERE j.id = ANY($1::uuid[])
"""


async def stream_page(
    connection: Connection, tenant_id: str, job_id: UUID, after: int, log_filter: LogFilter, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` chunks numbered above `after`, in their order. `restarts`: with this chunk an attempt starts the
    stream of its step anew. `superseded`: a later attempt has done so, and this chunk is void. A chunk with `cut` ends
    the stream of an attempt that emitted too much.
    """
    rows = await connection.fetch(STREAM_PAGE, job_id, tenant_id, after, log_filter.step, log_filter.attempt, limit)
    chunks = (
        {"n": row["before"] + nth, "at": row["at"]}
        | {name: row[name] for name in ("step", "attempt", "epoch", "superseded")}
        | {"restarts": row["restarts"] and nth == 1}
        | chunk
        for row in rows
        for nth, chunk in enumerate(row["chunks"], 1)
        if row["before"] + nth > after
    )
    return list(islice(chunks, limit))


async def stream_numbers(connection: Connection, job_ids: Iterable[UUID]) -> dict[UUID, int]:
    """By job: the number of its last chunk, or ENDED if the job has ended. Deleted jobs are absent."""
    rows = await connection.fetch(STREAM_NUMBERS, list(job_ids), ENDED)
    return {row["id"]: row["number"] for row in rows}
