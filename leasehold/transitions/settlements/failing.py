"""`fail` writes that attempts failed. A task then waits for its next attempt, or fails with its job."""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.db.database import Connection
from leasehold.domain.backoff import capped
from leasehold.transitions.endings import END_FAILED_JOBS
from leasehold.transitions.settlements.guard import HELD_IN_LIVE_JOB, lease_columns, settled_of
from leasehold.transitions.settlements.records import Failure, Settled

#: A task fails when this many of its attempts have crashed their child process.
MAX_CRASHES = 2

# This statement only locks. FAIL runs after it in the same transaction. FAIL may end a job with all its steps, so FAIL
# must see all steps. But a statement that waits for a lock keeps the snapshot of its start. If FAIL itself waited, it
# would not see the parts that another step has fanned out during the wait.
_LOCK_JOBS = """
-- settle_lock
SELECT FROM job j
WHERE j.id IN (SELECT t.job_id FROM task t WHERE t.id = ANY($1::uuid[]))
ORDER BY j.id
FOR UPDATE
"""

# $1 owners, $2 task ids, $3 epochs, $4 causes, $5 codes, $6 messages, $7 retryable, $8 delays in seconds,
# $9 MAX_CRASHES.
# HELD_IN_LIVE_JOB gives `lease_batch` (the leases of this call) and `held` (those that are still valid). The fragment
# END_FAILED_JOBS reads `attempt_ended`, and adds `advanced_jobs` and `woken_hints` (see endings.py).
FAIL = f"""-- fail
WITH {HELD_IN_LIVE_JOB}, decisions AS MATERIALIZED (
    -- `again`: the task may run again. `ends`: the job fails, because one of its tasks in this batch may not run again.
    -- Then no task of the job runs again. A step that a workflow started (`contained`) does not fail its job.
    SELECT failure.*, bool_or(NOT failure.again AND NOT failure.contained) OVER (PARTITION BY failure.job_id) AS ends
    FROM (
        SELECT t.id, t.job_id, t.contained, f.cause, f.code, f.message, f.delay, f.retryable,
               f.retryable AND CASE f.cause WHEN 'crash' THEN t.crashes + 1 < $9
                                            ELSE t.errors + 1 < t.max_attempts END AS again
        FROM held
        JOIN task t ON t.id = held.id
        JOIN unnest($4::text[], $5::text[], $6::text[], $7::bool[], $8::float8[])
            WITH ORDINALITY AS f(cause, code, message, retryable, delay, nth) ON f.nth = held.nth
    ) AS failure
), attempt_ended AS (
    -- Writes only tasks that pass the guard (guard.py). END_FAILED_JOBS reads this CTE, also the column `unblocks` (the
    -- ids of the tasks that need this one). The fragment adds `advanced_jobs` (the jobs of these tasks) and
    -- `woken_hints` (the hints of the workflows that it wakes). A hint is a message that tells workers of a due task.
    UPDATE task t
    SET status = CASE WHEN decisions.again AND NOT decisions.ends THEN 'retry' ELSE 'failed' END,
        lease_owner = NULL, lease_until = NULL,
        errors = t.errors + (decisions.cause <> 'crash')::int,
        crashes = t.crashes + (decisions.cause = 'crash')::int,
        available_at = clock_timestamp() + make_interval(secs => decisions.delay),
        finished_at = CASE WHEN NOT decisions.again OR decisions.ends THEN clock_timestamp() END
    FROM decisions WHERE t.id = decisions.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, t.contained, t.unblocks,
              decisions.ends, decisions.again, decisions.code, decisions.message, decisions.cause, decisions.retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM attempt_ended
){END_FAILED_JOBS}
-- `settled` is also true if this statement ran before, and only its answer was lost. Then the failure has the same
-- cause. It differs if, for example, the sweeper has failed the task because its worker was lost.
SELECT a.id AS task_id, f.status AS state,
       coalesce(f.id IS NOT NULL OR (t.epoch = a.epoch AND t.status IN ('retry', 'failed') AND ($4::text[])[a.nth] = (
           SELECT earlier.cause FROM failure earlier WHERE earlier.task_id = a.id AND earlier.epoch = a.epoch
       )), false) AS settled,
       coalesce(f.status, t.status) = 'failed' AND NOT t.contained AS is_dead_letter,
       e.id AS ended_job, e.pipeline, e.outcome, e.seconds,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN attempt_ended f ON f.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced_jobs e ON e.id = f.job_id AND e.status = 'failed'
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM woken_hints h
"""


async def fail(connection: Connection, failures: Sequence[Failure]) -> Settled:
    """If the failure is retryable and attempts are left, the task goes from running to retry. Otherwise the task goes
    from running to failed, and the job also fails.

    Exception: if a workflow started the step, the job does not fail. The statement wakes the workflow, and the
    workflow's code decides what follows.
    """
    owners, task_ids, epochs = lease_columns([failure.lease for failure in failures])
    async with connection.transaction():
        await connection.execute(_LOCK_JOBS, task_ids)
        rows = await connection.fetch(
            FAIL,
            owners,
            task_ids,
            epochs,
            [failure.cause for failure in failures],
            [failure.code for failure in failures],
            [failure.message for failure in failures],
            [failure.retryable for failure in failures],
            [capped(failure.delay) for failure in failures],
            MAX_CRASHES,
        )
    outcome = settled_of(rows, hints=True, ends=True)
    outcome.dead_letters.update(row["task_id"] for row in rows if row["settled"] and row["is_dead_letter"])
    return outcome
