"""Reads the load and the workers of a worker pool (workers that are scaled together): due tasks, running attempts,
living workers. The API computes from these how many workers the pool should have.

Each statement reads a bounded number of rows, for any number of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.db.database import Connection
from leasehold.db.job_reads import Row

#: At most this many due tasks of each queue are counted, and at most this many leases are read in all queues together.
MAX_COUNTED = 10_000
#: A `line` is all tasks of one tenant with one priority in a queue that wait to run, now or later. At most this many
#: lines of a queue are read.
MAX_LINES = 2000

# The due tasks of each queue. The recursion jumps through the index task_runnable from line to line, and reads only the
# first task of each line; `nth` counts the lines of a queue. Then the statement counts at most `share.max_tasks` due
# tasks of each line. The CTE `share` divides the $2 tasks of a queue evenly among its lines.
# $1 the queues. Of each queue, the statement counts at most $2 due tasks, and reads at most $3 lines.
_DUE = """
-- scaling_due
WITH RECURSIVE line(queue, priority, tenant_id, nth) AS (
    SELECT pool_queue.queue, first.priority, first.tenant_id, 1
    FROM unnest($1::text[]) AS pool_queue(queue) CROSS JOIN LATERAL (
        SELECT t.priority, t.tenant_id FROM task t
        WHERE t.queue = pool_queue.queue AND t.status IN ('pending', 'retry', 'waiting')
        ORDER BY t.priority, t.tenant_id LIMIT 1) AS first
    UNION ALL
    SELECT line.queue, next.priority, next.tenant_id, line.nth + 1
    FROM line CROSS JOIN LATERAL (
        SELECT t.priority, t.tenant_id FROM task t
        WHERE t.queue = line.queue AND t.status IN ('pending', 'retry', 'waiting')
          AND (t.priority, t.tenant_id) > (line.priority, line.tenant_id)
        ORDER BY t.priority, t.tenant_id LIMIT 1) AS next
    WHERE line.nth < $3
), share AS (
    SELECT queue, greatest($2 / count(*), 1) AS max_tasks FROM line GROUP BY queue
)
SELECT line.queue, sum(due_tasks.n)::int AS due, coalesce(max(due_tasks.seconds), 0)::float8 AS oldest
FROM line JOIN share ON share.queue = line.queue
CROSS JOIN LATERAL (
    SELECT count(*) AS n, max(extract(epoch FROM now() - available_at)) AS seconds FROM (
        SELECT t.available_at FROM task t
        WHERE t.queue = line.queue AND t.priority = line.priority AND t.tenant_id = line.tenant_id
          AND t.status IN ('pending', 'retry', 'waiting') AND t.available_at <= now()
        ORDER BY t.available_at LIMIT share.max_tasks) AS counted
) AS due_tasks
WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = line.queue)
GROUP BY line.queue
"""

# The running attempts of each queue. `attempt_seconds`: about how long an attempt takes. At any moment the running
# attempts are half done on average, so an attempt takes about twice their average age.
# $1 the queues. The statement reads at most $2 leases.
_RUNNING = """
-- scaling_running
SELECT lease.queue, w.version, count(*)::int AS running,
       2 * avg(greatest(extract(epoch FROM now() - lease.started_at), 0))::float8 AS attempt_seconds
FROM (SELECT queue, started_at, lease_owner FROM task
      WHERE status = 'running' AND queue = ANY($1) LIMIT $2) AS lease
LEFT JOIN worker w ON w.id = lease.lease_owner
GROUP BY lease.queue, w.version
"""

# $1 the pool, $2 seconds after which a worker without a heartbeat counts as silent.
_WORKERS = """
-- scaling_workers
SELECT w.version, w.queues, w.slots, w.draining, w.started_at FROM worker w
WHERE w.pool = $1 AND w.seen_at > now() - make_interval(secs => $2)
ORDER BY w.started_at DESC LIMIT 10000
"""


async def due_tasks(connection: Connection, queues: Sequence[str]) -> Sequence[Row]:
    """By queue: the number of tasks that could start now (`due`), and the seconds that the oldest of them has waited
    (`oldest`). Paused queues, and queues without tasks, are absent.
    """
    return await connection.fetch(_DUE, list(queues), MAX_COUNTED, MAX_LINES)


async def running_attempts(connection: Connection, queues: Sequence[str]) -> Sequence[Row]:
    """By queue and version of the worker: the number of running attempts, and about how long an attempt takes."""
    return await connection.fetch(_RUNNING, list(queues), MAX_COUNTED)


async def workers(connection: Connection, pool: str, silent_seconds: float) -> Sequence[Row]:
    """The living workers of the pool, the newest first. `slots[n]`: how many tasks of `queues[n]` the worker runs at
    once. A worker without a heartbeat for `silent_seconds` is left out.
    """
    return await connection.fetch(_WORKERS, pool, silent_seconds)
