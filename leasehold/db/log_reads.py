"""Reads the log lines of a job's attempts, and the chunks of the streams that the attempts emitted, for the API and the
console. Each read is one statement.

Every query names the tenant. Exception: `log_numbers` and `stream_numbers` do not, because their callers have already
found each job through its tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection

#: `log_numbers` and `stream_numbers` return this number for a job that has ended, because no line or chunk follows.
ENDED = 2**62

# A row of job_log holds `n` lines as a JSON array. All lines of a job are numbered. `last`: the number of the row's
# last line. `before`: the number of the line before the row's first line. A page of N lines reads at most N rows.
LOG_PAGE = """
-- log_page
SELECT last - n AS before, step, epoch, attempt, lines
FROM job_log
WHERE job_id = $1 AND tenant_id = $2 AND last > $3
  AND ($4::text IS NULL OR step = $4) AND ($5::int IS NULL OR attempt = $5)
ORDER BY last LIMIT $6
"""

# The table `tail` has the numbers of each job's last line and last chunk.
LOG_NUMBERS = """
-- log_numbers
SELECT j.id, CASE WHEN j.finished_at IS NULL THEN coalesce(tail.log_seq, 0) ELSE $2::bigint END AS number
FROM job j LEFT JOIN tail ON tail.job_id = j.id WHERE j.id = ANY($1::uuid[])
"""


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The step, and the attempt (a number from 1), whose lines or chunks are read. None: any step, or any attempt."""

    step: str | None = None
    attempt: int | None = None


async def log_page(
    connection: Connection, tenant_id: str, job_id: UUID, after: int, log_filter: LogFilter, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` lines numbered above `after`, in their order."""
    rows = await connection.fetch(LOG_PAGE, job_id, tenant_id, after, log_filter.step, log_filter.attempt, limit)
    return list(islice((line for line in _lines_of(rows) if line["n"] > after), limit))


def _lines_of(rows: Iterable[asyncpg.Record]) -> Iterator[dict[str, Any]]:
    """The lines of the rows, each with its number in the job (`n`), its step, its attempt and the attempt's epoch."""
    for row in rows:
        row_fields = {"step": row["step"], "attempt": row["attempt"], "epoch": row["epoch"]}
        for number, line in enumerate(row["lines"], row["before"] + 1):
            yield {"n": number} | row_fields | line


LOG_END = """
-- log_end
SELECT last - n AS before, step, epoch, attempt, lines
FROM job_log WHERE job_id = $1 AND tenant_id = $2 ORDER BY last DESC LIMIT $3
"""


async def log_end(connection: Connection, tenant_id: str, job_id: UUID, limit: int) -> list[dict[str, Any]]:
    """The last `limit` lines, in their order."""
    rows = await connection.fetch(LOG_END, job_id, tenant_id, limit)
    return list(_lines_of(reversed(rows)))[-limit:]


async def log_numbers(connection: Connection, job_ids: Iterable[UUID]) -> dict[UUID, int]:
    """Job -> the number of its last line, or ENDED if the job has ended. Deleted jobs are absent."""
    rows = await connection.fetch(LOG_NUMBERS, list(job_ids), ENDED)
    return {row["id"]: row["number"] for row in rows}


# A row of job_stream holds `n` chunks, as a row of job_log holds lines. `restarts` in the result: the row's first chunk
# is the first stored chunk of an attempt that starts the stream of its step anew. The column `restarts` is true in
# every row of such an attempt, so the statement also checks that the attempt has no earlier row. (It does not check
# that the chunk is the attempt's number 1, because the attempt's first chunks may have been refused.) `superseded`: a
# later attempt has started the stream anew, so the row's chunks are void.
STREAM_PAGE = """
-- stream_page
SELECT s.last - s.n AS before, s.step, s.epoch, s.attempt, s.chunks, s.at,
       s.restarts AND NOT EXISTS (SELECT 1 FROM job_stream earlier
                                  WHERE earlier.task_id = s.task_id AND earlier.epoch = s.epoch
                                    AND earlier.last < s.last) AS restarts,
       EXISTS (SELECT 1 FROM job_stream later
               WHERE later.task_id = s.task_id AND later.epoch > s.epoch AND later.restarts) AS superseded
FROM job_stream s
WHERE s.job_id = $1 AND s.tenant_id = $2 AND s.last > $3 AND ($4::text IS NULL OR s.step = $4)
  AND ($5::int IS NULL OR s.attempt = $5)
ORDER BY s.last LIMIT $6
"""

# Reads the last chunks that no later attempt supersedes.
STREAM_END = """
-- stream_end
SELECT s.step, s.chunks
FROM job_stream s
WHERE s.job_id = $1 AND s.tenant_id = $2
  AND NOT EXISTS (SELECT 1 FROM job_stream later
                  WHERE later.task_id = s.task_id AND later.epoch > s.epoch AND later.restarts)
ORDER BY s.last DESC LIMIT $3
"""


async def stream_end(connection: Connection, tenant_id: str, job_id: UUID, limit: int) -> list[dict[str, Any]]:
    """The last `limit` chunks that no later attempt supersedes, in their order, each with its `step`."""
    rows = await connection.fetch(STREAM_END, job_id, tenant_id, limit)
    return [{"step": row["step"]} | chunk for row in reversed(rows) for chunk in row["chunks"]][-limit:]


STREAM_NUMBERS = """
-- stream_numbers
SELECT j.id, CASE WHEN j.finished_at IS NULL THEN coalesce(tail.stream_seq, 0) ELSE $2::bigint END AS number
FROM job j LEFT JOIN tail ON tail.job_id = j.id WHERE j.id = ANY($1::uuid[])
"""


async def stream_page(
    connection: Connection, tenant_id: str, job_id: UUID, after: int, log_filter: LogFilter, limit: int
) -> list[dict[str, Any]]:
    """At most `limit` chunks numbered above `after`, in their order. `restarts`: with this chunk an attempt starts the
    stream of its step anew. `superseded`: a later attempt has started the stream anew, and this chunk is void. `cut`:
    the attempt emitted too much, and its stream ends here.
    """
    rows = await connection.fetch(STREAM_PAGE, job_id, tenant_id, after, log_filter.step, log_filter.attempt, limit)
    return list(islice((chunk for chunk in _chunks_of(rows) if chunk["n"] > after), limit))


def _chunks_of(rows: Iterable[asyncpg.Record]) -> Iterator[dict[str, Any]]:
    """The chunks of the rows, each with its number in the job (`n`) and the fields that `stream_page` describes."""
    for row in rows:
        row_fields = {name: row[name] for name in ("at", "step", "attempt", "epoch", "superseded")}
        first_number = row["before"] + 1
        for number, chunk in enumerate(row["chunks"], first_number):
            yield {"n": number} | row_fields | {"restarts": row["restarts"] and number == first_number} | chunk


async def stream_numbers(connection: Connection, job_ids: Iterable[UUID]) -> dict[UUID, int]:
    """Job -> the number of its last chunk, or ENDED if the job has ended. Deleted jobs are absent."""
    rows = await connection.fetch(STREAM_NUMBERS, list(job_ids), ENDED)
    return {row["id"]: row["number"] for row in rows}
