"""Stores the log lines of attempts in the table `job_log`. No state of a job or task changes.

A worker sends the lines of an attempt in chunks: each has the lines that the attempt has logged since the previous
chunk. `append` writes a chunk even if the attempt has lost its lease, because the lines of a lost attempt help most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson

from leasehold.db.database import Connection
from leasehold.transitions.numbering import insert_numbered


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Log lines of the attempt that `task_id`, `epoch` and `attempt` name. `lines`: one JSON object for each line.
    `first`: the number of the first line. An attempt's lines are numbered from 1.
    """

    task_id: UUID
    epoch: int
    attempt: int
    first: int
    lines: Sequence[bytes]


# The CTE `asynchronous` lets the commit not wait for the disk. The attempt's settlement (the commit of its outcome)
# follows, and writes this commit to the disk, too. An attempt that has lost its lease has no settlement, so a crash of
# the server may lose its last lines. PostgreSQL evaluates `set_config` only because a later part reads `setting`.
# `insert_numbered` makes the end of the statement, which numbers the lines of each job and inserts the chunks. `n`: how
# many lines a chunk has.
APPEND_LOG = f"""
-- append_log
WITH asynchronous AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) AS setting
), chunk AS MATERIALIZED (
    SELECT t.job_id, t.tenant_id, t.id, t.step, c.epoch, c.attempt, c.first, c.n, c.lines, c.nth,
           sum(c.n) OVER (PARTITION BY t.job_id ORDER BY c.nth) AS running_total, asynchronous.setting
    FROM asynchronous
    CROSS JOIN unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::int[], $6::jsonb[])
        WITH ORDINALITY AS c(id, epoch, attempt, first, n, lines, nth)
    JOIN task t ON t.id = c.id
), {insert_numbered("job_log", "log_seq", "lines")}"""


async def append(connection: Connection, chunks: Sequence[LogChunk]) -> None:
    """Write the chunks in this order. Chunks of deleted jobs are dropped."""
    await connection.execute(
        APPEND_LOG,
        [chunk.task_id for chunk in chunks],
        [chunk.epoch for chunk in chunks],
        [chunk.attempt for chunk in chunks],
        [chunk.first for chunk in chunks],
        [len(chunk.lines) for chunk in chunks],
        [orjson.Fragment(b"[%b]" % b",".join(chunk.lines)) for chunk in chunks],
    )
