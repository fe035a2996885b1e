"""SQL fragments that end jobs without success, and the record of a job that has ended.

The settlements `fail` and `acknowledge_cancel`, and the sweeper's statements for lost leases and requested cancels,
append one of the two fragments to their own CTEs. The comment above each fragment names the CTE that the fragment
needs, and the columns of this CTE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import RELAY_AT
from leasehold.db.database import unindexed

# This fragment needs the CTE `attempt_ended`: the tasks whose attempts ended without success, as the statement has just
# written them. It has these columns of the task: id, job_id, step, position, epoch, status, available_at, contained and
# unblocks (the ids of the tasks that need this one). It also has columns of the failure: cause, code, message and
# retryable. `ends`: whether the task's job fails now. `again`: whether the task could run again if its job went on. If
# the job fails because of another task, this task fails, too, even if `again` is true.
#
# `status` is the task's next state: `failed` (no attempt follows), `retry` (the task runs again after a failure) or
# `pending` (the task runs again because its worker was lost). Each task gets an event. A job with `ends` fails: its
# other open steps are skipped or cancelled, and no step keeps a lease. If the job goes on, a failed step that a
# workflow started (`contained`) is given up. Such a step then counts as an ended step of the job, and wakes the
# workflow.
#
# After the fragment, the statement may read two CTEs. `advanced_jobs` has a row for each job of these tasks: id,
# tenant_id, status, trace, pipeline, and seq (the number of the job's last event before this statement). The row also
# has seconds (the age of the job) and outcome (see JobEnded; null if the job goes on). `woken_hints` has the hints
# (messages that tell workers of due tasks) of woken workflows: id, task_id, queue, priority, headers.
#
# `unindexed`: PostgreSQL uses no partial index for the condition. RELAY_AT: from this time on, the relay (a duty of the
# workers) publishes the hint if the process that wrote it has not done so.
END_FAILED_JOBS = f"""
, other_steps AS (
    -- The other open steps of the jobs that fail.
    UPDATE task s
    SET status = CASE WHEN s.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE s.job_id IN (SELECT job_id FROM attempt_ended WHERE ends)
      AND s.id NOT IN (SELECT id FROM attempt_ended)
      AND s.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING s.id, s.job_id, s.step, s.position, s.epoch, s.status
), task_events AS (
    -- One event for each task, numbered within the job: `nth` of `event_count`. The ended attempts come first.
    SELECT changed.*, row_number() OVER (PARTITION BY job_id ORDER BY sort_group, position) AS nth,
           count(*) OVER (PARTITION BY job_id) AS event_count
    FROM (
        SELECT 0 AS sort_group, id, job_id, step, position, epoch, status,
               contained AND status = 'failed' AS given_up,
               jsonb_build_object('code', code, 'message', message, 'cause', cause,
                   'retry_at', CASE WHEN status <> 'failed' THEN available_at END) AS data
        FROM attempt_ended
        UNION ALL
        SELECT 1, id, job_id, step, position, epoch, status, false, NULL FROM other_steps
    ) AS changed
), per_job AS (
    SELECT job_id, count(*)::int AS event_count, (count(*) FILTER (WHERE sort_group = 0))::int AS attempts,
           (count(*) FILTER (WHERE given_up))::int AS given_up
    FROM task_events GROUP BY job_id
), job_error AS (
    -- A job that fails gets the error of one ended step. A step that may not run again comes first, then a step that
    -- no workflow started, then the step with the lowest position.
    SELECT DISTINCT ON (job_id) job_id, code, message, step, retryable FROM attempt_ended
    WHERE ends ORDER BY job_id, again, contained, position
), advanced_jobs AS (
    -- `leased`: how many of the job's steps are held by workers. `steps_left`: how many have not ended.
    UPDATE job j
    SET status = CASE WHEN job_error.code IS NULL THEN j.status ELSE 'failed' END,
        error = CASE WHEN job_error.code IS NULL THEN j.error
                     ELSE jsonb_build_object('code', job_error.code, 'message', job_error.message,
                                             'step', job_error.step, 'retryable', job_error.retryable) END,
        finished_at = CASE WHEN job_error.code IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN job_error.code IS NOT NULL
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        leased = CASE WHEN job_error.code IS NULL THEN j.leased - per_job.attempts ELSE 0 END,
        steps_left = j.steps_left - per_job.given_up,
        event_seq = j.event_seq + per_job.event_count
    FROM per_job LEFT JOIN job_error ON job_error.job_id = per_job.job_id
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.event_count AS seq, j.pipeline,
              CASE WHEN job_error.retryable THEN 'failed'
                   WHEN NOT job_error.retryable THEN 'rejected' END AS outcome,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    -- A job that fails shows its new status in its last event only.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT e.job_id, a.seq + e.nth, a.tenant_id,
           CASE e.status WHEN 'retry' THEN 'retried' WHEN 'pending' THEN 'lost' ELSE e.status END,
           CASE WHEN a.status = 'failed' AND e.nth < e.event_count THEN 'running' ELSE a.status END,
           e.id, e.step, e.status, e.epoch, e.data
    FROM task_events e JOIN advanced_jobs a ON a.id = e.job_id
), woken_workflows AS (
    -- The workflows whose steps have failed for good. `news` counts the ended steps and the signals of a workflow. If
    -- `news` reaches `wake_at` (settlements/completion.py), the workflow is due now. Then `wake_at` becomes null, and
    -- `woken_hints` writes a hint.
    UPDATE task w
    SET news = w.news + failed.steps, wake_at = CASE WHEN w.news + failed.steps < w.wake_at THEN w.wake_at END,
        available_at = CASE WHEN w.status = 'waiting' AND w.news + failed.steps >= w.wake_at THEN clock_timestamp()
                            ELSE w.available_at END
    FROM (
        SELECT workflow, count(*)::int AS steps
        FROM attempt_ended, unnest(attempt_ended.unblocks) AS workflow
        WHERE contained AND status = 'failed' AND NOT ends GROUP BY workflow
    ) AS failed
    WHERE w.id = failed.workflow AND w.id NOT IN (SELECT id FROM attempt_ended)
      AND {unindexed("(w.status = 'waiting' AND w.wake_at IS NOT NULL) OR w.status = 'running'")}
    RETURNING w.id, w.job_id, w.queue, w.priority, w.status, w.wake_at
), woken_hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, a.trace, {RELAY_AT}
    FROM woken_workflows w JOIN advanced_jobs a ON a.id = w.job_id
    WHERE w.status = 'waiting' AND w.wake_at IS NULL
    RETURNING id, task_id, queue, priority, headers
)"""

# This fragment needs the CTE `stopped_steps`: leased steps that have stopped, in jobs that are being cancelled. The CTE
# has the task's id, job_id, step, position and epoch, and `data`: the data of the step's event, or NULL.
#
# Each step gets an event. A job whose last leased step has stopped is cancelled now. After the fragment, the statement
# may read `advanced_jobs`, which has a row for each job of these steps: id, tenant_id, status, pipeline, seq (the
# number of the job's last event before this statement), stopped_count and seconds.
END_CANCELLED_JOBS = """
, advanced_jobs AS (
    UPDATE job j
    SET leased = j.leased - per_job.stopped_count,
        status = CASE WHEN j.leased = per_job.stopped_count THEN 'cancelled' ELSE j.status END,
        finished_at = CASE WHEN j.leased = per_job.stopped_count THEN clock_timestamp() END,
        expires_at = CASE WHEN j.leased = per_job.stopped_count
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + per_job.stopped_count
    FROM (SELECT job_id, count(*)::int AS stopped_count FROM stopped_steps GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - per_job.stopped_count AS seq, per_job.stopped_count,
              j.pipeline, extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, a.seq + s.nth, a.tenant_id, 'cancelled',
           CASE WHEN s.nth < a.stopped_count THEN 'cancel_requested' ELSE a.status END, s.id, s.step, 'cancelled',
           s.epoch, s.data
    FROM (
        SELECT stopped_steps.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth FROM stopped_steps
    ) AS s JOIN advanced_jobs a ON a.id = s.job_id
)"""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A job that a statement has ended. `outcome`: succeeded, rejected (the job's input cannot succeed), failed,
    expired or cancelled. `seconds`: from the job's submission to its end.
    """

    pipeline: str
    outcome: str
    seconds: float


def ended_jobs(rows: Iterable[Any]) -> list[JobEnded]:
    """The jobs that ended, each once. `rows`: with the columns ended_job (NULL: no job ended), pipeline, outcome,
    seconds.
    """
    by_id: dict[UUID, JobEnded] = {
        row["ended_job"]: JobEnded(row["pipeline"], row["outcome"], row["seconds"])
        for row in rows
        if row["ended_job"] is not None
    }
    return list(by_id.values())
