"""`fail`: an attempt failed. The task waits for its next attempt, or fails with its job."""

from __future__ import annotations

from collections.abc import Sequence

from leasehold.db.database import Connection
from leasehold.transitions.endings import END_FAILED_JOBS
from leasehold.transitions.settlements.guard import HELD_IN_LIVE_JOB, lease_columns, settled_of
from leasehold.transitions.settlements.records import Failure, Settled

#: An attempt that kills its child process this often is poison: the task fails.
MAX_CRASHES = 2

# FAIL runs after this statement, in the same transaction, because FAIL may end the job with all its steps. A statement
# that itself waited for the lock would not see the parts into which a sibling has fanned out meanwhile.
_LOCK_JOBS = """
-- settle_lock
SELECT FROM job j
WHERE j.id IN (SELECT t.job_id FROM task t WHERE t.id = ANY($1::uuid[]))
ORDER BY j.id
FOR UPDATE
"""

# $4 causes, $5 codes, $6 messages, $7 retryable, $8 delays in seconds, $9 MAX_CRASHES
FAIL = f"""-- fail
WITH {HELD_IN_LIVE_JOB}, judged AS MATERIALIZED (
    -- `again`: every failure of the job in this batch may be retried. Else all of them fail.
    SELECT t.id, t.job_id, f.cause, f.code, f.message, f.delay, f.retryable,
           bool_and(f.retryable AND CASE f.cause WHEN 'crash' THEN t.crashes + 1 < $9
                                                 ELSE t.errors + 1 < t.max_attempts END)
               OVER (PARTITION BY t.job_id) AS again
    FROM held
    JOIN task t ON t.id = held.id
    JOIN unnest($4::text[], $5::text[], $6::text[], $7::bool[], $8::float8[])
        WITH ORDINALITY AS f(cause, code, message, retryable, delay, nth) ON f.nth = held.nth
), failed AS (
    -- The guarded write. END_FAILED_JOBS reads this CTE.
    UPDATE task t
    SET status = CASE WHEN judged.again THEN 'retry' ELSE 'failed' END,
        lease_owner = NULL, lease_until = NULL,
        errors = t.errors + (judged.cause <> 'crash')::int,
        crashes = t.crashes + (judged.cause = 'crash')::int,
        available_at = clock_timestamp() + make_interval(secs => judged.delay),
        finished_at = CASE WHEN NOT judged.again THEN clock_timestamp() END
    FROM judged WHERE t.id = judged.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, judged.code, judged.message,
              judged.cause, judged.retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM failed
){END_FAILED_JOBS}
SELECT a.id AS task_id, f.status AS state,
       coalesce(f.id IS NOT NULL OR (t.epoch = a.epoch AND t.status IN ('retry', 'failed')), false) AS settled,
       e.id AS ended_job, e.pipeline, e.outcome, e.seconds
FROM asked a LEFT JOIN failed f ON f.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced e ON e.id = f.job_id AND e.status = 'failed'
"""


async def fail(connection: Connection, failures: Sequence[Failure]) -> Settled:
    """running -> retry while the failure is retryable and attempts are left; else -> failed, and the job fails, too."""
    leases = lease_columns([failure.lease for failure in failures])
    async with connection.transaction():
        await connection.execute(_LOCK_JOBS, leases[1])
        rows = await connection.fetch(
            FAIL,
            *leases,
            [failure.cause for failure in failures],
            [failure.code for failure in failures],
            [failure.message for failure in failures],
            [failure.retryable for failure in failures],
            [failure.delay for failure in failures],
            MAX_CRASHES,
        )
    return settled_of(rows, ends=True)
