"""Steps that external workers (programs of clients) claim over HTTP. This module ends such a step after its time limit,
locks its job, and reads the results of the earlier steps that the step needs. PostgreSQL's clock measures the time
limit. Neither a heartbeat nor a renewed lease extends the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.domain.backoff import DEFAULT_LADDER, delay_after
from leasehold.domain.errors import RequestError
from leasehold.domain.lease import Lease
from leasehold.evaluation.templates import Templates
from leasehold.telemetry.duties import counted
from leasehold.transitions import settlements
from leasehold.transitions.quarantine import not_in, run_unit
from leasehold.transitions.settlements import Failure, Settled, Verdict

#: The name of this maintenance duty in the table `quarantine` (`counted` also creates its counters). A task that the
#: duty could not end has a row there until the duty tries again. `not_in` leaves such tasks out.
DUTY = counted("external_limits")

_IS_OF_TENANT = """
-- external_task
SELECT EXISTS (SELECT FROM task t WHERE t.id = $1 AND t.tenant_id = $2)
"""

# Returns a row if the task belongs to the tenant $3. `locked`: the task's job, if the owner $2 holds the lease; only
# then the job is locked. While the caller holds the job's lock, no other transaction settles the step.
_LOCK = """
-- external_lock
SELECT (SELECT j.id FROM job j WHERE j.id = t.job_id AND t.lease_owner = $2 FOR UPDATE) AS locked
FROM task t WHERE t.id = $1 AND t.tenant_id = $3
"""

# Whether the attempt with the lease (task $1, owner $2, epoch $3) has run past the step's time limit. No row: the lease
# is lost.
_LATE = f"""
-- external_late
SELECT t.started_at + make_interval(secs => t.timeout_seconds) < clock_timestamp() FROM task t
WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND {unindexed("t.status = 'running'")}
"""

# Finds steps of external workers that run past their time limit, at most $1.
_OVERDUE = f"""
-- external_overdue
SELECT t.id, t.tenant_id, t.lease_owner, t.epoch, t.attempt FROM task t
WHERE t.status = 'running' AND starts_with(t.queue, 'ext:')
  AND t.started_at + make_interval(secs => t.timeout_seconds) < clock_timestamp() AND {not_in(DUTY, "t.id")}
LIMIT $1
"""

# Returns a row for each task `c` of $1 and each succeeded step `p` that this task needs.
_NEEDED = """
-- external_needed
SELECT c.id AS task_id, p.step, r.value,
       (SELECT jsonb_agg(jsonb_build_object('name', o.name, 'key', o.key, 'size', o.size, 'sha256', o.sha256,
                                            'content_type', o.content_type) ORDER BY o.name)
        FROM output o WHERE o.task_id = p.id) AS files
FROM task c JOIN task p ON p.job_id = c.job_id AND c.id = ANY(p.unblocks) AND p.status = 'succeeded'
LEFT JOIN result r ON r.task_id = p.id
WHERE c.id = ANY($1::uuid[])
ORDER BY p.position
"""


async def is_of_tenant(connection: Connection, tenant_id: str, task_id: UUID) -> bool:
    """Whether the tenant has this task. Call this, or `lock`, before each settlement. Without this check, a client of
    another tenant could name the task and the epoch of an ended attempt, and would get the answer `settled`: the task's
    row has no lease owner any more, so the settlement looks like a repetition of the one that ended the attempt.
    """
    return bool(await connection.fetchval(_IS_OF_TENANT, task_id, tenant_id))


async def lock(connection: Connection, tenant_id: str, lease: Lease) -> bool:
    """If the lease's owner still holds it, lock its job until the caller's transaction ends. Returns whether the tenant
    has the task, as `is_of_tenant` does, and not whether the job was locked.
    """
    return await connection.fetchrow(_LOCK, lease.task_id, lease.owner, tenant_id) is not None


async def is_late(connection: Connection, lease: Lease) -> bool:
    """Whether the step of this lease is past its time limit. False if the lease is lost. Call this after `lock`,
    because then no other transaction can settle the step before the caller's transaction ends.
    """
    return bool(await connection.fetchval(_LATE, lease.task_id, lease.owner, lease.epoch))


async def time_out(connection: Connection, templates: Templates, tenant_id: str, lease: Lease) -> Settled:
    """Settle a step whose attempt ran longer than the step's time limit. The step's state changes from running to retry
    or, after its last attempt, to failed, together with its job. In a run that is being cancelled, it changes to
    cancelled.
    """
    delay = (await backoff(connection, templates, tenant_id, lease.task_id)).total_seconds()
    failure = Failure(lease, "timeout", "step_timeout", "the step ran past its time limit", retryable=True, delay=delay)
    outcome = await settlements.fail(connection, [failure])
    if outcome.verdicts[lease.task_id] is Verdict.LOST:  # `fail` settles nothing in a run that is being cancelled
        outcome = await settlements.acknowledge_cancel(connection, [lease])
    return outcome


async def backoff(connection: Connection, templates: Templates, tenant_id: str, task_id: UUID) -> timedelta:
    """The wait before the next attempt, by the ladder of the template's retry policy. A ladder is a list of waits, one
    for each failure. If the template cannot be read, or the task belongs to no run, DEFAULT_LADDER is used.
    """
    row = await connection.fetchrow(
        "SELECT t.step, t.errors, r.template, r.version FROM task t JOIN run r ON r.job_id = t.job_id"
        " WHERE t.id = $1 AND t.tenant_id = $2",
        task_id,
        tenant_id,
    )
    if row is None:
        return delay_after(1, DEFAULT_LADDER)
    try:
        template_version = await templates.find_for_run(connection, tenant_id, row["template"], row["version"])
        ladder = template_version.template.retry(row["step"]).ladder
    except RequestError:
        ladder = DEFAULT_LADDER
    return delay_after(row["errors"] + 1, ladder)


async def end_overdue(connection: Connection, templates: Templates, limit: int = 100) -> list[Settled]:
    """Time out the steps that run longer than their limit, even if their workers are alive. The function ends each step
    separately, because an error with one step must not stop the other steps.
    """
    outcomes = []
    for row in await connection.fetch(_OVERDUE, limit):
        # This lease only serves to settle the step, so nobody reads its `trusted_until`.
        lease = Lease(row["id"], row["lease_owner"], row["epoch"], row["attempt"], trusted_until=monotonic())
        work = partial(time_out, connection, templates, row["tenant_id"], lease)
        outcome = await run_unit(connection, DUTY, row["id"], work)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


async def needed_steps(connection: Connection, task_ids: Sequence[UUID]) -> dict[UUID, list[Any]]:
    """Task id -> a row for each succeeded step that the task needs, with the `value` and the `files` of this step."""
    needed_by_task: dict[UUID, list[Any]] = {task_id: [] for task_id in task_ids}
    if not task_ids:
        return {}
    for row in await connection.fetch(_NEEDED, list(task_ids)):
        needed_by_task[row["task_id"]].append(row)
    return needed_by_task
