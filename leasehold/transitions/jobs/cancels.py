"""`request_cancel`: a client, an operator, a newer run or a workflow cancels jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.states import JobState
from leasehold.transitions.endings import JobEnded, ended_jobs

# Locks those of the jobs $1 of the tenant $2 that may be cancelled. If $3 is true, this includes jobs that are not
# cancelable. REQUEST_CANCEL runs after this statement in the same transaction. The reason: a statement that waits for a
# lock keeps its old snapshot. So if REQUEST_CANCEL itself waited for the job's lock, it would read the steps as they
# were before the wait. `unindexed` keeps PostgreSQL from using a partial index for the condition.
_LOCK_CANCELABLE = f"""
-- cancel_lock
SELECT j.id FROM job j
WHERE j.id = ANY($1::uuid[]) AND j.tenant_id = $2 AND j.status <> 'cancel_requested' AND (j.cancelable OR $3)
  AND {unindexed("j.finished_at IS NULL")}
ORDER BY j.id
FOR UPDATE
"""

# $1: the locked jobs. $2: who cancels them, and why (the columns `cancel` and `event.data`).
REQUEST_CANCEL = f"""
-- cancel
WITH resumed_workflows AS (
    -- A workflow that has called something (`journaled`) is due now: its code sees the cancel, and may undo its work.
    -- The job counts this workflow as leased until the workflow has ended.
    UPDATE task t
    SET wake_at = NULL, available_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND t.journaled AND {unindexed("t.status IN ('pending', 'retry', 'waiting')")}
    RETURNING t.id, t.job_id, t.queue, t.priority
), stopped_steps AS (
    -- The other steps that no worker runs end now.
    UPDATE task t
    SET status = CASE WHEN t.status = 'blocked' THEN 'skipped' ELSE 'cancelled' END, finished_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND t.status IN ('blocked', 'pending', 'retry', 'waiting')
      AND NOT (t.journaled AND t.status <> 'blocked')
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status
), counts AS (
    SELECT j.id, count(s.id)::int AS stopped_count,
           j.leased + (SELECT count(*)::int FROM resumed_workflows r WHERE r.job_id = j.id) AS leased
    FROM job j LEFT JOIN stopped_steps s ON s.job_id = j.id
    WHERE j.id = ANY($1::uuid[]) GROUP BY j.id
), advanced_jobs AS (
    -- Without a leased step the job has ended; else its workers have until `cancel_by` to stop.
    UPDATE job j
    SET status = CASE WHEN counts.leased = 0 THEN 'cancelled' ELSE 'cancel_requested' END, leased = counts.leased,
        cancel = $2::jsonb || jsonb_build_object('at', clock_timestamp()),
        cancel_by = clock_timestamp() + make_interval(secs => j.grace_seconds), held = false,
        finished_at = CASE WHEN counts.leased = 0 THEN clock_timestamp() END,
        expires_at = CASE WHEN counts.leased = 0 THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + counts.stopped_count + 1
    FROM counts WHERE j.id = counts.id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - counts.stopped_count - 1 AS seq,
              counts.stopped_count, j.pipeline,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), cancel_event AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, data)
    SELECT id, seq + 1, tenant_id, 'cancel_requested',
           CASE WHEN stopped_count = 0 THEN status ELSE 'cancel_requested' END, $2::jsonb
    FROM advanced_jobs
), events AS (
    -- One event for each stopped step, numbered by `nth`. Only the last one has the job's new status.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT s.job_id, a.seq + 1 + s.nth, a.tenant_id, s.status,
           CASE WHEN s.nth < a.stopped_count THEN 'cancel_requested' ELSE a.status END, s.id, s.step, s.status, s.epoch
    FROM (
        SELECT stopped_steps.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth FROM stopped_steps
    ) AS s JOIN advanced_jobs a ON a.id = s.job_id
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT r.id, r.job_id, r.queue, r.priority, a.trace, {RELAY_AT}
    FROM resumed_workflows r JOIN advanced_jobs a ON a.id = r.job_id
    RETURNING id, task_id, job_id, queue, priority, headers
)
SELECT a.id, a.status, CASE WHEN a.status = 'cancelled' THEN a.id END AS ended_job, a.pipeline, a.status AS outcome,
       a.seconds, h.id AS outbox_id, h.task_id, h.queue, h.priority, h.headers
FROM advanced_jobs a LEFT JOIN hints h ON h.job_id = a.id
"""


@dataclass(frozen=True, slots=True)
class Cancels:
    """The new states of the cancelled jobs, and the jobs that ended immediately. `hints`: the hints (messages that tell
    workers of due tasks) of the workflows whose code must see the cancel. After the commit, the caller publishes the
    hints. If the caller does not, the relay publishes them a second later.
    """

    states: dict[UUID, JobState]
    ended: list[JobEnded]
    hints: list[Announcement]


async def request_cancel(
    connection: Connection,
    job_ids: Sequence[UUID],
    tenant_id: str,
    *,
    reason: str,
    by: str,
    forced: bool = False,
    operation_id: UUID | None = None,
) -> Cancels:
    """Unfinished -> cancelled if no step of the job is leased, else -> cancel_requested. No step starts any more.

    Exception: a workflow that waits becomes due now, and its job becomes cancel_requested. So the workflow's code sees
    the cancel, and has the job's `grace_seconds` to react.

    The result leaves out a job that has ended, is being cancelled already, belongs to another tenant, or is not
    cancelable (unless `forced`). The job's history shows `reason`, `by` (who cancels) and `operation_id` (the bulk
    operation that cancels this job among others).
    """
    async with connection.transaction():
        locked_ids = [row["id"] for row in await connection.fetch(_LOCK_CANCELABLE, list(job_ids), tenant_id, forced)]
        if not locked_ids:
            return Cancels({}, [], [])
        cancel = {"reason": reason, "by": by} | ({} if operation_id is None else {"operation": str(operation_id)})
        rows = await connection.fetch(REQUEST_CANCEL, locked_ids, cancel)
    hints = [Announcement.from_row(row) for row in rows if row["outbox_id"] is not None]
    return Cancels({row["id"]: JobState(row["status"]) for row in rows}, ended_jobs(rows), hints)
