"""The lines that attempts log, kept with their jobs. No state changes.

A chunk is what an attempt has logged since its last chunk. `tail` has a row for each job that has logged, which
numbers the job's lines. The row is locked until the chunk is committed: so a reader that has line 7 never meets a new
line 6. A chunk names its attempt, and is written whether or not the attempt still has its lease: the lines of an
attempt that was lost are wanted most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson

from leasehold.db.database import Connection


@dataclass(frozen=True, slots=True)
class LogChunk:
    """`lines`: JSON, one object each. `first`: the first line's number among those of its attempt, from 1."""

    task_id: UUID
    epoch: int
    attempt: int
    first: int
    lines: Sequence[bytes]


# The statement may be repeated: `first` makes a chunk's second copy a conflict. The copy's numbers then stay unused.
# It need not wait for the disk: the settlement of the attempt follows, and its commit flushes this one, too.
APPEND_LOG = """
-- append_log
WITH eager AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) AS setting
), chunk AS MATERIALIZED (
    SELECT t.job_id, t.tenant_id, t.id, t.step, c.epoch, c.attempt, c.first, c.n, c.lines, c.nth,
           sum(c.n) OVER (PARTITION BY t.job_id ORDER BY c.nth) AS last, eager.setting
    FROM eager
    CROSS JOIN unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::int[], $6::jsonb[])
        WITH ORDINALITY AS c(id, epoch, attempt, first, n, lines, nth)
    JOIN task t ON t.id = c.id
), numbered AS (
    INSERT INTO tail AS o (job_id, log_seq)
    SELECT job_id, sum(n) FROM chunk GROUP BY job_id ORDER BY job_id
    ON CONFLICT (job_id) DO UPDATE SET log_seq = o.log_seq + excluded.log_seq
    RETURNING job_id, log_seq
), total AS (
    SELECT job_id, sum(n) AS n FROM chunk GROUP BY job_id
)
INSERT INTO job_log (job_id, last, tenant_id, task_id, step, epoch, attempt, first, n, lines)
SELECT c.job_id, numbered.log_seq - total.n + c.last, c.tenant_id, c.id, c.step, c.epoch, c.attempt, c.first, c.n,
       c.lines
FROM chunk c JOIN numbered ON numbered.job_id = c.job_id JOIN total ON total.job_id = c.job_id
ORDER BY c.nth
ON CONFLICT (task_id, epoch, first) DO NOTHING
"""


async def append(connection: Connection, chunks: Sequence[LogChunk]) -> None:
    """Write the chunks in this order. Those of jobs that are deleted are dropped."""
    await connection.execute(
        APPEND_LOG,
        [chunk.task_id for chunk in chunks],
        [chunk.epoch for chunk in chunks],
        [chunk.attempt for chunk in chunks],
        [chunk.first for chunk in chunks],
        [len(chunk.lines) for chunk in chunks],
        [orjson.Fragment(b"[%b]" % b",".join(chunk.lines)) for chunk in chunks],
    )
