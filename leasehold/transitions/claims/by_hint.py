"""`claim`: a worker claims the tasks that its hints name (messages about due tasks). `claim_again` repeats claims whose
answer was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from time import monotonic
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.transitions.claims.marking import job_columns, mark_claimed
from leasehold.transitions.claims.records import Claimed, LeaseTerms, claimed_of
from leasehold.transitions.workers import LEASE_HAS_PASSED, owner_is_dead

# SQL: the task `t` may be claimed now. Either it is due. Or it is running, and its owner is dead, its lease has
# expired, or this owner holds it and claims again ($6). In a job that is being cancelled, only a workflow (`journaled`)
# is claimed, so that its code sees the cancel; `end_cancels` ends the lost leases of such a job. The CASE keeps the
# planner from an index by status: with it, PostgreSQL would read a whole backlog to find a few tasks.
_MAY_BE_CLAIMED = f"""NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = t.queue)
      AND CASE WHEN t.status IN ('pending', 'retry', 'waiting') THEN t.available_at <= clock_timestamp()
                   AND (t.journaled OR NOT found.cancelling)
               WHEN t.status = 'running' THEN t.losses < $4
                   AND ((t.lease_owner = $2 AND $6 AND (t.journaled OR NOT found.cancelling))
                        OR (NOT found.cancelling AND (({LEASE_HAS_PASSED}) OR {owner_is_dead("$5::uuid[]")})))
               ELSE false END"""

# SQL: the claim charges the task a loss (an attempt whose worker was lost). If the owner claims again what it holds,
# only an answer was lost, and no attempt. So a failover, which loses many answers, charges no task.
_IS_LOSS = "found.was = 'running' AND NOT ($6 AND t.lease_owner = $2)"

# $1 task ids, $2 owner, $3 duration of the lease, $4 the number of losses from which a running task is not claimed any
# more, $5 dead owners, $6 whether the owner may claim a task again that it holds itself.
CLAIM = f"""
-- claim
WITH jobs AS MATERIALIZED (
    -- Waits for the lock of each job. The statement that holds the lock is short. If this statement passed the job
    -- over, the job would lose its hint.
    SELECT j.id, hinted.tasks, hinted.statuses, {job_columns()}
    FROM (
        SELECT t.job_id, array_agg(t.id) AS tasks, array_agg(t.status) AS statuses
        FROM task t WHERE t.id = ANY($1::uuid[]) GROUP BY t.job_id
    ) AS hinted JOIN job j ON j.id = hinted.job_id
    WHERE j.status IN ('pending', 'queued', 'running', 'waiting_worker', 'cancel_requested')
    ORDER BY j.id
    FOR UPDATE OF j
), found AS MATERIALIZED (
    -- The sort reads all of `jobs` first: so all jobs are locked before the first task is.
    SELECT hinted.id, hinted.was, {job_columns("jobs")}
    FROM jobs CROSS JOIN LATERAL unnest(jobs.tasks, jobs.statuses) AS hinted(id, was)
    ORDER BY hinted.id
){mark_claimed(_MAY_BE_CLAIMED, _IS_LOSS)}
SELECT * FROM counted ORDER BY id
"""


async def claim(
    connection: Connection,
    terms: LeaseTerms,
    task_ids: Sequence[UUID],
    dead_owners: Sequence[UUID] = (),
    *,
    reclaim: bool = False,
) -> list[Claimed]:
    """pending | retry | waiting (due), or running with an expired lease or an owner in `dead_owners` -> running.

    `reclaim`: also claim tasks that this owner holds already, because the answer to an earlier claim was lost. This
    charges them no loss.

    A task that is not in the answer has ended, is not due, is unknown, or has a living owner: acknowledge its hint.
    """
    requested_at = monotonic()
    rows = await connection.fetch(
        CLAIM, list(task_ids), terms.owner, timedelta(seconds=terms.ttl), terms.max_losses, list(dead_owners), reclaim
    )
    return [claimed_of(row, terms, requested_at) for row in rows]


# For each completed task ($1) the next step that its completion claimed. $2 the owner, $3 the tasks that the worker
# knows it holds: they are left out.
_CLAIMED_NEXT_STEPS = """
-- claimed_with
SELECT DISTINCT ON (t.id) t.id AS task_id, c.id AS next
FROM task t JOIN task c ON c.id = ANY(t.unblocks)
WHERE t.id = ANY($1::uuid[]) AND c.status = 'running' AND c.lease_owner = $2 AND c.id <> ALL($3::uuid[])
ORDER BY t.id, c.position
"""


async def claim_again(
    connection: Connection,
    completed: Sequence[UUID],
    workflow_of_step: Mapping[UUID, UUID],
    terms: LeaseTerms,
    held: Sequence[UUID],
) -> dict[UUID, Claimed]:
    """running -> running, at a new epoch. A settlement that completes or suspends a task may also claim a next step for
    the same worker. If its answer was lost, the worker does not know this step: call this to claim it again.

    `completed`: tasks that were completed. `workflow_of_step`: a step that a suspension started -> the workflow's task.
    Returns settled task -> its next step. Steps in `held` are left out: the worker knows that it holds them.
    """
    settled_of_next = {step: workflow for step, workflow in workflow_of_step.items() if step not in held}
    if completed:
        rows = await connection.fetch(_CLAIMED_NEXT_STEPS, list(completed), terms.owner, list(held))
        settled_of_next |= {row["next"]: row["task_id"] for row in rows}
    next_ids = sorted(settled_of_next)
    next_steps = await claim(connection, terms, next_ids, reclaim=True) if next_ids else []
    return {settled_of_next[claimed.lease.task_id]: claimed for claimed in next_steps}
