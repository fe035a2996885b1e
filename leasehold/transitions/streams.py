"""Writes the chunks that attempts emit (the pieces of a job's stream) to the table `job_stream`. Only the holder of the
lease may write. No job or task changes its state.

A step that runs again begins its stream again. In all rows of such an attempt `restarts` is true, and readers then drop
the chunks of earlier attempts of that step. The first row alone would not be enough, because PostgreSQL may refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from leasehold.db.database import Connection, unindexed
from leasehold.domain.lease import Lease
from leasehold.transitions.numbering import insert_numbered


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """A row of `job_stream`: successive chunks of one attempt. `chunks`: each is one JSON object. `first`: the first
    chunk's number among all chunks of its attempt, from 1. `restarts`: if True, the chunks of earlier attempts of the
    step are void; if False, they are void only if an attempt has failed since the last chunk.
    """

    lease: Lease
    first: int
    chunks: Sequence[bytes]
    restarts: bool


# This statement has the form of APPEND_LOG: the commit does not wait for the disk, and `insert_numbered` numbers the
# chunks. logs.py gives the reasons. But this statement writes a row only while the row's attempt has the lease. The CTE
# `chunk` has a row for each StreamChunk. `n`: how many chunks of the stream that row has.
#
# An attempt at a snoozed task continues the stream, unless attempts have failed since the task's last row. The
# statement recognises this by the number of the attempt. After a snooze, the next attempt has the same number as in
# that row. After a failure it has a higher number. (The first claim, with the epoch 1, has no earlier row.) All rows of
# one attempt have the same `restarts`.
APPEND_STREAM = f"""
-- append_stream
WITH asynchronous AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) AS setting
), chunk AS MATERIALIZED (
    SELECT t.job_id, t.tenant_id, t.id, t.step, c.epoch, t.attempt, c.first, c.n, c.chunks, c.nth,
           CASE WHEN c.restarts OR c.epoch = 1 THEN c.restarts
                ELSE coalesce((SELECT CASE WHEN s.epoch = c.epoch THEN s.restarts ELSE s.attempt < t.attempt END
                               FROM job_stream s WHERE s.task_id = c.id ORDER BY s.epoch DESC, s.first DESC LIMIT 1),
                              false) END AS restarts,
           sum(c.n) OVER (PARTITION BY t.job_id ORDER BY c.nth) AS running_total, asynchronous.setting
    FROM asynchronous
    CROSS JOIN unnest($1::uuid[], $2::uuid[], $3::int[], $4::int[], $5::int[], $6::bool[], $7::jsonb[])
        WITH ORDINALITY AS c(owner, id, epoch, first, n, restarts, chunks, nth)
    JOIN task t ON t.id = c.id AND t.lease_owner = c.owner AND t.epoch = c.epoch AND {unindexed("t.status = 'running'")}
), {insert_numbered("job_stream", "stream_seq", "restarts, chunks")}"""


async def append(connection: Connection, chunks: Sequence[StreamChunk]) -> None:
    """Write the chunks in the given order. Chunks of lost leases are dropped."""
    await connection.execute(
        APPEND_STREAM,
        [chunk.lease.owner for chunk in chunks],
        [chunk.lease.task_id for chunk in chunks],
        [chunk.lease.epoch for chunk in chunks],
        [chunk.first for chunk in chunks],
        [len(chunk.chunks) for chunk in chunks],
        [chunk.restarts for chunk in chunks],
        [orjson.Fragment(b"[%b]" % b",".join(chunk.chunks)) for chunk in chunks],
    )
