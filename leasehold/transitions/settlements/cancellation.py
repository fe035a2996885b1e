"""`acknowledge_cancel` writes that an attempt has stopped because its job is being cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.transitions.endings import END_CANCELLED_JOBS
from leasehold.transitions.settlements.guard import HELD_IN_CANCELLED_JOB, lease_columns, settle_twice, settled_of
from leasehold.transitions.settlements.records import Settled

# HELD_IN_CANCELLED_JOB adds the CTEs `lease_batch` (the given leases) and `held` (the tasks that are still held under
# these leases, in jobs that are being cancelled). When none of the job's steps is leased any more, the fragment
# END_CANCELLED_JOBS ends the job. The fragment reads `stopped_steps`, and adds `advanced_jobs`, a row for each job of
# these steps. `settled` is also true if an earlier try, whose answer was lost, has stopped the step.
ACKNOWLEDGE_CANCEL = f"""-- acknowledge_cancel
WITH {HELD_IN_CANCELLED_JOB}, stopped_steps AS (
    -- Writes only tasks that pass the guard (guard.py).
    UPDATE task t
    SET status = 'cancelled', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, NULL::jsonb AS data
){END_CANCELLED_JOBS}
SELECT a.id AS task_id, 'cancelled' AS state,
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'cancelled'), false) AS settled,
       e.id AS ended_job, e.pipeline, e.status AS outcome, e.seconds
FROM lease_batch a LEFT JOIN stopped_steps s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced_jobs e ON e.id = s.job_id AND e.status = 'cancelled'
"""


async def acknowledge_cancel(connection: Connection, leases: Sequence[Lease]) -> Settled:
    """Mark running tasks as cancelled, in jobs that are being cancelled. A job ends when the last of its leased steps
    has ended.

    A lease of a job that is not being cancelled changes nothing, and its verdict is LOST.
    """
    return await settle_twice(partial(_acknowledge_cancel, connection), leases, lambda lease: lease)


async def _acknowledge_cancel(connection: Connection, leases: Sequence[Lease]) -> Settled:
    return settled_of(await connection.fetch(ACKNOWLEDGE_CANCEL, *lease_columns(leases)), ends=True)
