"""The chunks that attempts emit, kept with their jobs. No state changes; only the holder of the lease may write.

As logs.py numbers lines, `tail` numbers the chunks of a job. A step that runs again begins its stream again: the first
write of such an attempt says so (`restarts`), and readers drop what earlier attempts of that step have emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from leasehold.db.database import Connection, unindexed
from leasehold.domain.lease import Lease


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """`chunks`: JSON, one object each. `first`: the first chunk's number among those of its attempt, from 1.
    `restarts`: the chunks of earlier attempts of the step are void.
    """

    lease: Lease
    first: int
    chunks: Sequence[bytes]
    restarts: bool


# As append_log, but under the lease: a zombie writes nothing.
APPEND_STREAM = f"""
-- append_stream
WITH eager AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true) AS setting
), chunk AS MATERIALIZED (
    SELECT t.job_id, t.tenant_id, t.id, t.step, c.epoch, t.attempt, c.first, c.n, c.chunks, c.restarts, c.nth,
           sum(c.n) OVER (PARTITION BY t.job_id ORDER BY c.nth) AS last, eager.setting
    FROM eager
    CROSS JOIN unnest($1::uuid[], $2::uuid[], $3::int[], $4::int[], $5::int[], $6::bool[], $7::jsonb[])
        WITH ORDINALITY AS c(owner, id, epoch, first, n, restarts, chunks, nth)
    JOIN task t ON t.id = c.id AND t.lease_owner = c.owner AND t.epoch = c.epoch AND {unindexed("t.status = 'running'")}
), numbered AS (
    INSERT INTO tail AS o (job_id, stream_seq)
    SELECT job_id, sum(n) FROM chunk GROUP BY job_id ORDER BY job_id
    ON CONFLICT (job_id) DO UPDATE SET stream_seq = o.stream_seq + excluded.stream_seq
    RETURNING job_id, stream_seq
), total AS (
    SELECT job_id, sum(n) AS n FROM chunk GROUP BY job_id
)
INSERT INTO job_stream (job_id, last, tenant_id, task_id, step, epoch, attempt, first, n, restarts, chunks)
SELECT c.job_id, numbered.stream_seq - total.n + c.last, c.tenant_id, c.id, c.step, c.epoch, c.attempt, c.first, c.n,
       c.restarts, c.chunks
FROM chunk c JOIN numbered ON numbered.job_id = c.job_id JOIN total ON total.job_id = c.job_id
ORDER BY c.nth
ON CONFLICT (task_id, epoch, first) DO NOTHING
"""


async def append(connection: Connection, chunks: Sequence[StreamChunk]) -> None:
    """Write the chunks in this order. Those of lost leases are dropped."""
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
