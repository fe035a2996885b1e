"""Reads the load of this cell, and which tenants and jobs the cell has. A cell is one of several installations, each of
which has a part of the tenants. The API gives the answers to operators, who may ask from other cells, too.

Each statement reads a bounded number of rows, however many jobs there are.
"""

from __future__ import annotations

from uuid import UUID

from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.db.task_lines import lines_of_all_queues

#: Due tasks, running tasks, failed steps and tenants are counted up to this number.
MAX_COUNTED = 1000

# Returns one row with the numbers that `load` describes. Tasks, steps and tenants are counted up to about $1. A worker
# counts as living if it had a heartbeat within the last $2 seconds.
#
# `line` has a row for each queue, priority and tenant with waiting tasks (task_lines.py). `share.max_tasks`: at most
# this many tasks of each line are counted, so that all lines together count about $1 tasks. `due_tasks`: for each line,
# how many tasks could start now (`n`), and when the oldest of them became due. `failing_tenant`: tenants with failed
# tasks. `tenant`: tenants with jobs. The recursive CTEs jump through an index from one value to the next, and `nth`
# counts the values.
LOAD = f"""
-- cell_load
WITH RECURSIVE {lines_of_all_queues("$1")}, share AS (
    SELECT greatest($1 / greatest(count(*), 1), 1) AS max_tasks FROM line
), due_tasks AS (
    SELECT counted.n, counted.oldest FROM line CROSS JOIN share CROSS JOIN LATERAL (
        SELECT count(*) AS n, min(first.available_at) AS oldest FROM (
            SELECT t.available_at FROM task t
            WHERE t.queue = line.queue AND t.priority = line.priority AND t.tenant_id = line.tenant_id
              AND t.status IN ('pending', 'retry', 'waiting') AND t.available_at <= statement_timestamp()
            ORDER BY t.available_at LIMIT share.max_tasks) AS first) AS counted
    WHERE NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = line.queue)
), failing_tenant(tenant_id, nth) AS (
    (SELECT t.tenant_id, 1 FROM task t WHERE t.status = 'failed' ORDER BY t.tenant_id LIMIT 1)
    UNION ALL
    SELECT next.tenant_id, last.nth + 1 FROM failing_tenant last CROSS JOIN LATERAL (
        SELECT t.tenant_id FROM task t WHERE t.status = 'failed' AND t.tenant_id > last.tenant_id
        ORDER BY t.tenant_id LIMIT 1) AS next
    WHERE last.nth < $1
), tenant(tenant_id, nth) AS (
    (SELECT j.tenant_id, 1 FROM job j ORDER BY j.tenant_id LIMIT 1)
    UNION ALL
    SELECT next.tenant_id, tenant.nth + 1 FROM tenant CROSS JOIN LATERAL (
        SELECT j.tenant_id FROM job j WHERE j.tenant_id > tenant.tenant_id ORDER BY j.tenant_id LIMIT 1) AS next
    WHERE tenant.nth < $1
), living_worker AS (
    SELECT version FROM worker WHERE seen_at > statement_timestamp() - make_interval(secs => $2)
)
SELECT (SELECT coalesce(sum(n), 0)::int FROM due_tasks) AS due,
       (SELECT coalesce(bool_or(due_tasks.n >= share.max_tasks), false) FROM due_tasks CROSS JOIN share)
           OR (SELECT count(*) >= $1 FROM line) AS has_more,
       (SELECT extract(epoch FROM statement_timestamp() - min(oldest))::float8 FROM due_tasks) AS oldest_seconds,
       (SELECT count(*)::int FROM (SELECT 1 FROM task t WHERE t.status = 'running' LIMIT $1) AS counted) AS running,
       (SELECT count(*)::int FROM (
            SELECT 1 FROM failing_tenant CROSS JOIN LATERAL (
                SELECT 1 FROM task t WHERE t.status = 'failed' AND t.tenant_id = failing_tenant.tenant_id
                  AND t.finished_at > statement_timestamp() - interval '1 hour' LIMIT $1) AS recent
            LIMIT $1) AS counted) AS failed,
       (SELECT count(*)::int FROM tenant WHERE NOT EXISTS (
            SELECT 1 FROM tenant_move m
            WHERE m.tenant_id = tenant.tenant_id AND m.direction = 'out' AND m.stage = 'moved')) AS tenants,
       (SELECT count(*)::int FROM living_worker) AS workers,
       ARRAY(SELECT DISTINCT w.version FROM (SELECT version FROM living_worker LIMIT $1) AS w ORDER BY 1) AS versions,
       (SELECT count(*)::int FROM tenant_move m WHERE m.direction = 'out' AND m.stage <> 'moved') AS moving
"""


async def load(connection: Connection, silent_seconds: float) -> Row:
    """The load of the cell. `due`: tasks that could start now, without those of paused queues. `has_more`: there may be
    more due tasks. `oldest_seconds`: how long the oldest due task has waited; None: no task is due. `running`: running
    tasks. `failed`: steps that failed for good within the last hour. `tenants`: tenants with jobs, without those that
    have moved away. `workers`, `versions`: the number and the versions of the workers that have had a heartbeat within
    `silent_seconds`. `moving`: tenants that are on their way to another cell.

    Tasks, steps and tenants are counted up to MAX_COUNTED.
    """
    row = await connection.fetchrow(LOAD, MAX_COUNTED, silent_seconds)
    assert row is not None
    return row


# `holder`: the tenant of the job, if this cell has the job or its tombstone (what a deleted job leaves for a day).
_JOB = """
-- cell_job
SELECT holder.tenant_id, m.to_cell AS moved_to FROM (
    SELECT tenant_id FROM job WHERE id = $1
    UNION ALL SELECT tenant_id FROM tombstone WHERE job_id = $1 LIMIT 1
) AS holder
LEFT JOIN tenant_move m ON m.tenant_id = holder.tenant_id AND m.direction = 'out' AND m.stage = 'moved'
"""

# `holder`: the tenant, if this cell has a job, an API key or a person of the tenant.
_TENANT = """
-- cell_tenant
SELECT holder.tenant_id, m.to_cell AS moved_to FROM (
    SELECT $1::text AS tenant_id WHERE EXISTS (SELECT 1 FROM job WHERE tenant_id = $1)
        OR EXISTS (SELECT 1 FROM api_key WHERE tenant_id = $1) OR EXISTS (SELECT 1 FROM person WHERE tenant_id = $1)
) AS holder
LEFT JOIN tenant_move m ON m.tenant_id = holder.tenant_id AND m.direction = 'out' AND m.stage = 'moved'
"""


async def holder_of_job(connection: Connection, job_id: UUID) -> Row | None:
    """The tenant of the job (`tenant_id`), and the cell to which this tenant has moved (`moved_to`; None: it has not
    moved). A deleted job has an answer while its tombstone is kept. Returns None for an unknown job.
    """
    return await connection.fetchrow(_JOB, job_id)


async def holder_of_tenant(connection: Connection, tenant_id: str) -> Row | None:
    """Like `holder_of_job`, but for a tenant. Returns None if the tenant has no jobs, keys or people in this cell."""
    return await connection.fetchrow(_TENANT, tenant_id)
