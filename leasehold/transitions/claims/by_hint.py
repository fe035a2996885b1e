"""`claim`: a worker claims the tasks that its hints (messages about due tasks) name. `claim_again` repeats claims whose
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

# SQL: the task `t` may be claimed now by the owner $2. (CLAIM below has these parameters.) There are three cases.
# First: the task is due. Second: the owner $2 holds the task, and $6 allows that this owner claims it again. Third: the
# task runs, but the owner of its lease is dead, or the lease has expired, and the task has fewer than $4 losses
# (attempts whose worker was lost).
#
# In a job that is being cancelled (`cancelling`), only a workflow (`journaled`) is claimed, because its code must see
# the cancel. If the lease of such a workflow expires, no claim takes the workflow over. Within the grace (the time that
# a cancelled attempt has to stop) the sweeper makes the workflow due again. After the grace, or after too many losses,
# the sweeper ends the workflow (`end_cancels` in transitions/sweeps.py).
#
# The CASE keeps the planner from using an index by status. By that index PostgreSQL would read a whole backlog to find
# a few tasks.
_MAY_BE_CLAIMED = f"""NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = t.queue)
      AND CASE WHEN t.status IN ('pending', 'retry', 'waiting')
               THEN t.available_at <= clock_timestamp() AND (t.journaled OR NOT job_tasks.cancelling)
               WHEN t.status = 'running' AND t.lease_owner = $2 AND $6
               THEN t.journaled OR NOT job_tasks.cancelling
               WHEN t.status = 'running'
               THEN NOT job_tasks.cancelling AND t.losses < $4
                    AND (({LEASE_HAS_PASSED}) OR {owner_is_dead("$5::uuid[]")})
               ELSE false END"""

# SQL: whether the claim charges the task a loss. It charges a loss if the task was running, because then an attempt was
# lost. Exception: the owner itself holds the task, and claims it again. In this case no attempt was lost, but only the
# answer to the owner's earlier claim. So a failover, which loses many answers, charges no task a loss.
_IS_LOSS = "job_tasks.was = 'running' AND NOT ($6 AND t.lease_owner = $2)"

# $1: the ids of the tasks. $2: the owner that claims. $3: the duration of the lease. $4: a running task with this many
# losses is not taken over. $5: the dead owners. $6: whether the owner $2 also claims again the tasks that it holds.
# `mark_claimed` adds the CTEs that claim the tasks `t` which fulfil _MAY_BE_CLAIMED. The last of these CTEs,
# `numbered_tasks`, has a row for each claimed task.
CLAIM = f"""
-- claim
WITH jobs AS MATERIALIZED (
    -- Waits for the lock of each job. With SKIP LOCKED the hints of a job that another statement has locked would be
    -- acknowledged without a claim. The wait is short, because the other statement is short.
    SELECT j.id, hinted_tasks.tasks, hinted_tasks.statuses, {job_columns()}
    FROM (
        SELECT t.job_id, array_agg(t.id) AS tasks, array_agg(t.status) AS statuses
        FROM task t WHERE t.id = ANY($1::uuid[]) GROUP BY t.job_id
    ) AS hinted_tasks JOIN job j ON j.id = hinted_tasks.job_id
    WHERE j.status IN ('pending', 'queued', 'running', 'waiting_worker', 'cancel_requested')
    ORDER BY j.id
    FOR UPDATE OF j
), job_tasks AS MATERIALIZED (
    -- The sort reads all of `jobs` first, so all jobs are locked before the first task. `was`: the task's status until
    -- now.
    SELECT hinted_task.id, hinted_task.was, {job_columns("jobs")}
    FROM jobs CROSS JOIN LATERAL unnest(jobs.tasks, jobs.statuses) AS hinted_task(id, was)
    ORDER BY hinted_task.id
){mark_claimed(_MAY_BE_CLAIMED, _IS_LOSS)}
SELECT * FROM numbered_tasks ORDER BY id
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

    `reclaim`: also claim tasks that this owner holds already, because the answer to an earlier claim was lost. For
    these tasks the claim charges no loss.

    The result leaves out these tasks, but the caller must acknowledge their hints, too:
    - a task that has ended, is not due, or is unknown
    - a task with a living owner, or with too many losses
    - a task in a paused queue
    - a task whose job is being cancelled, unless the task is a due workflow
    """
    requested_at = monotonic()
    rows = await connection.fetch(
        CLAIM, list(task_ids), terms.owner, timedelta(seconds=terms.ttl), terms.max_losses, list(dead_owners), reclaim
    )
    return [claimed_of(row, terms, requested_at) for row in rows]


# Returns, for each completed task ($1), the next step that the task's completion claimed for the owner ($2), except
# steps of which the worker knows that it holds them ($3).
_CLAIMED_NEXT_STEPS = """
-- claimed_with
SELECT DISTINCT ON (t.id) t.id AS task_id, step.id AS next_step_id
FROM task t JOIN task step ON step.id = ANY(t.unblocks)
WHERE t.id = ANY($1::uuid[]) AND step.status = 'running' AND step.lease_owner = $2 AND step.id <> ALL($3::uuid[])
ORDER BY t.id, step.position
"""


async def claim_again(
    connection: Connection,
    completed_ids: Sequence[UUID],
    workflow_of_step: Mapping[UUID, UUID],
    terms: LeaseTerms,
    held_ids: Sequence[UUID],
) -> dict[UUID, Claimed]:
    """Claim again the next steps that this worker does not know, because the answers to settlements were lost: running
    -> running, at a new epoch.

    A settlement is the statement that writes how an attempt ended. When it completes a task or suspends a workflow, it
    may also claim a next step for the same worker. The answer names this step.

    `completed_ids`: the tasks that these settlements completed. `workflow_of_step`: step that a suspension started ->
    the workflow's task, at most one step for each workflow. `held_ids`: the tasks of which the worker knows that it
    holds them. Steps among them are left out. Returns completed task or workflow's task -> its next step.
    """
    # Next step -> the task whose settlement claimed it: a suspended workflow, or a completed task.
    settled_of_next = {step: workflow for step, workflow in workflow_of_step.items() if step not in held_ids}
    if completed_ids:
        rows = await connection.fetch(_CLAIMED_NEXT_STEPS, list(completed_ids), terms.owner, list(held_ids))
        settled_of_next |= {row["next_step_id"]: row["task_id"] for row in rows}
    next_ids = sorted(settled_of_next)
    next_steps = await claim(connection, terms, next_ids, reclaim=True) if next_ids else []
    return {settled_of_next[claimed.lease.task_id]: claimed for claimed in next_steps}
