"""`release`: a worker returns a lease, mostly because the worker stops. Any worker may claim the task immediately."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from leasehold.broker.outbox import RELAY_AT
from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.transitions.settlements.guard import HELD_OR_TO_SEE_CANCEL, lease_columns, settle_twice, settled_of
from leasehold.transitions.settlements.records import Settled

# HELD_OR_TO_SEE_CANCEL gives `lease_batch` (the leases of this call) and `held` (the leases among them that are still
# valid, and that may be released).
RELEASE = f"""-- release
WITH {HELD_OR_TO_SEE_CANCEL}, released_tasks AS (
    -- Writes only tasks that pass the guard (guard.py). The attempt does not count.
    UPDATE task t
    SET status = 'pending', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        available_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority
), advanced_jobs AS (
    -- In a job that is being cancelled, `leased` still counts a released workflow, which must run once more to see the
    -- cancel.
    UPDATE job j
    SET event_seq = j.event_seq + per_job.released_count,
        leased = j.leased - CASE j.status WHEN 'cancel_requested' THEN 0 ELSE per_job.released_count END
    FROM (SELECT job_id, count(*)::int AS released_count FROM released_tasks GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.released_count AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.id), a.tenant_id, 'released',
           a.status, r.id, r.step, 'pending', r.epoch
    FROM released_tasks r JOIN advanced_jobs a ON a.id = r.job_id
), hints AS (
    -- Queues `ext:` belong to external workers, which poll. The caller publishes the hints. After `relay_at` the relay
    -- (a duty of the workers) publishes those that the caller has not published.
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT r.id, r.job_id, r.queue, r.priority, a.trace, {RELAY_AT}
    FROM released_tasks r JOIN advanced_jobs a ON a.id = r.job_id
    WHERE NOT starts_with(r.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
-- `settled` is also true if this statement ran before, and only its answer was lost. A task whose lease the sweeper has
-- ended is pending, too, but then the lease has a failure. (PostgreSQL could turn an EXISTS into a hash table of all
-- failures.)
SELECT a.id AS task_id,
       coalesce(r.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'pending' AND (
           SELECT f.cause FROM failure f WHERE f.task_id = a.id AND f.epoch = a.epoch) IS NULL), false) AS settled,
       'pending' AS state,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN released_tasks r ON r.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hints h
"""


async def release(connection: Connection, leases: Sequence[Lease]) -> Settled:
    """running -> pending. The attempt does not count. The statement writes a new hint (a message that the task is due).

    In a job that is being cancelled, only a workflow that has made a call is released, because its code must still see
    the cancel. The verdict of any other lease of such a job is LOST.
    """
    return await settle_twice(partial(_release, connection), leases, lambda lease: lease)


async def _release(connection: Connection, leases: Sequence[Lease]) -> Settled:
    return settled_of(await connection.fetch(RELEASE, *lease_columns(leases)), hints=True)
