"""How a job ends without success: the SQL that every statement shares which can fail or cancel a job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.db.database import unindexed

# After a CTE `failed` of settled tasks, with their code and message; `ends`: whether the task's job fails with them. Of
# such a job the other steps are skipped, and running siblings lose their leases. In a job that goes on, a step of a
# workflow (`contained`) wakes the workflow. Any other status (`retry`, `pending`) is recorded only.
END_FAILED_JOBS = f"""
, rest AS (
    -- The other open steps of the jobs that fail.
    UPDATE task s
    SET status = CASE WHEN s.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE s.job_id IN (SELECT job_id FROM failed WHERE ends)
      AND s.id NOT IN (SELECT id FROM failed)
      AND s.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING s.id, s.job_id, s.step, s.position, s.epoch, s.status
), news AS (
    -- One event for each task, numbered within the job; the settled tasks come first.
    SELECT n.*, row_number() OVER (PARTITION BY job_id ORDER BY first, position) AS nth,
           count(*) OVER (PARTITION BY job_id) AS n
    FROM (
        SELECT 0 AS first, id, job_id, step, position, epoch, status, contained AND status = 'failed' AS given_up,
               jsonb_build_object('code', code, 'message', message, 'cause', cause,
                   'retry_at', CASE WHEN status <> 'failed' THEN available_at END) AS data
        FROM failed
        UNION ALL
        SELECT 1, id, job_id, step, position, epoch, status, false, NULL FROM rest
    ) AS n
), advanced AS (
    -- `ended`: the first failed step of a job that fails; its error becomes the job's.
    UPDATE job j
    SET status = CASE WHEN ended.code IS NULL THEN j.status ELSE 'failed' END,
        error = CASE WHEN ended.code IS NULL THEN j.error
                     ELSE jsonb_build_object('code', ended.code, 'message', ended.message, 'step', ended.step,
                                             'retryable', ended.retryable) END,
        finished_at = CASE WHEN ended.code IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN ended.code IS NOT NULL
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        leased = CASE WHEN ended.code IS NULL THEN j.leased - mine.settled ELSE 0 END,
        steps_left = j.steps_left - mine.given_up,
        event_seq = j.event_seq + mine.n
    FROM (
        SELECT job_id, count(*)::int AS n, (count(*) FILTER (WHERE first = 0))::int AS settled,
               (count(*) FILTER (WHERE given_up))::int AS given_up
        FROM news GROUP BY job_id
    ) AS mine
    LEFT JOIN (
        SELECT DISTINCT ON (job_id) job_id, code, message, step, retryable FROM failed
        WHERE ends ORDER BY job_id, contained, position
    ) AS ended ON ended.job_id = mine.job_id
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - mine.n AS seq, j.pipeline,
              CASE WHEN ended.retryable THEN 'failed' ELSE 'rejected' END AS outcome,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT n.job_id, a.seq + n.nth, a.tenant_id,
           CASE n.status WHEN 'retry' THEN 'retried' WHEN 'pending' THEN 'lost' ELSE n.status END,
           CASE WHEN a.status = 'failed' AND n.nth < n.n THEN 'running' ELSE a.status END,
           n.id, n.step, n.status, n.epoch, n.data
    FROM news n JOIN advanced a ON a.id = n.job_id
), woken AS (
    -- The workflows whose steps gave up: an end like any other (settlements/completion.py).
    UPDATE task w
    SET news = w.news + gone.n, wake_at = CASE WHEN w.news + gone.n < w.wake_at THEN w.wake_at END,
        available_at = CASE WHEN w.status = 'waiting' AND w.news + gone.n >= w.wake_at THEN clock_timestamp()
                            ELSE w.available_at END
    FROM (
        SELECT parent, count(*)::int AS n FROM failed, unnest(failed.unblocks) AS parent
        WHERE contained AND status = 'failed' AND NOT ends GROUP BY parent
    ) AS gone
    WHERE w.id = gone.parent AND w.id NOT IN (SELECT id FROM failed)
      AND {unindexed("(w.status = 'waiting' AND w.wake_at IS NOT NULL) OR w.status = 'running'")}
    RETURNING w.id, w.job_id, w.queue, w.priority, w.status, w.wake_at
), woken_hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM woken w JOIN advanced a ON a.id = w.job_id
    WHERE w.status = 'waiting' AND w.wake_at IS NULL
    RETURNING id, task_id, queue, priority, headers
)"""

# After a CTE `stopped` of leased steps that stopped, in jobs that are being cancelled. A job without any leased step is
# cancelled now.
END_CANCELLED_JOBS = """
, advanced AS (
    UPDATE job j
    SET leased = j.leased - mine.n,
        status = CASE WHEN j.leased = mine.n THEN 'cancelled' ELSE j.status END,
        finished_at = CASE WHEN j.leased = mine.n THEN clock_timestamp() END,
        expires_at = CASE WHEN j.leased = mine.n THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + mine.n
    FROM (SELECT job_id, count(*)::int AS n FROM stopped GROUP BY job_id) AS mine
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - mine.n AS seq, mine.n, j.pipeline,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, a.seq + s.nth, a.tenant_id, 'cancelled',
           CASE WHEN s.nth < a.n THEN 'cancel_requested' ELSE a.status END, s.id, s.step, 'cancelled', s.epoch, s.data
    FROM (
        SELECT stopped.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth FROM stopped
    ) AS s JOIN advanced a ON a.id = s.job_id
)"""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job that a statement ended. `outcome`: succeeded, rejected (its input cannot succeed), failed, expired or
    cancelled. `seconds`: since its submission.
    """

    pipeline: str
    outcome: str
    seconds: float


def jobs_ended(rows: Iterable[Any]) -> list[JobEnded]:
    """The jobs that ended, by the columns ended_job, pipeline, outcome and seconds of `rows`; each job once."""
    by_id: dict[UUID, JobEnded] = {
        row["ended_job"]: JobEnded(row["pipeline"], row["outcome"], row["seconds"])
        for row in rows
        if row["ended_job"] is not None
    }
    return list(by_id.values())
