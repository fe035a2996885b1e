"""Settles steps that failed or were stopped, and of which nobody knows whether they ordered something. Only a person
can find out. `write` writes the person's decision. If the person has found the order, the step also gets a value. In a
failed job, `resolve` sets the step to succeeded and writes this value. In a job that does not run again, `record` only
writes the value.

The person's decision is a row of the table `settlement`, which has at most one row for each epoch of a step. So if two
people settle the same step, the first decision counts, and the second person sees it. A step that runs again and fails
again can be settled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection, lock_name
from leasehold.db.unsettled import IS_UNKNOWN
from leasehold.domain.errors import Conflict
from leasehold.domain.states import JobState

#: What to do about an order that the step may have placed with a provider. adopt: the provider's order with the given
#: id is this step's order; again: place the order again; give_up: leave the job as it has ended.
Action: TypeAlias = Literal["adopt", "again", "give_up"]

# Sets the failed step $3 to succeeded, with the value $4. The epoch rises, so that writes with the failed attempt's
# lease change nothing. `waiting_on` counts the steps for which a task waits. The statement REPLAY (replays.py) runs
# later in the same transaction, and makes the next steps runnable. `c`: a step that needs the resolved step; `d`: the
# resolved step. `event_seq` is the number of the job's last event. It rises by one: `changed_job` stores the new
# number, and the INSERT computes the same number for the event.
RESOLVE = """
-- resolve
WITH locked_job AS MATERIALIZED (
    SELECT j.id, j.tenant_id, j.status, j.event_seq FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND j.status = 'failed'
      AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
    FOR UPDATE
), resolved_step AS (
    UPDATE task t SET status = 'succeeded', finished_at = clock_timestamp(), epoch = t.epoch + 1
    FROM locked_job WHERE t.job_id = locked_job.id AND t.step = $3 AND t.status = 'failed'
    RETURNING t.id, t.job_id, t.step, t.epoch, t.unblocks
), dependents AS (
    UPDATE task c SET waiting_on = c.waiting_on - 1 FROM resolved_step WHERE c.id = ANY(resolved_step.unblocks)
), results AS (
    INSERT INTO result (task_id, value) SELECT id, $4::jsonb FROM resolved_step
    ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
), changed_job AS (
    UPDATE job j SET steps_left = j.steps_left - 1, event_seq = j.event_seq + 1
    FROM resolved_step WHERE j.id = resolved_step.job_id
)
INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
SELECT l.id, l.event_seq + 1, l.tenant_id, 'completed', l.status, d.id, d.step, 'succeeded', d.epoch,
       jsonb_build_object('resolved_by', $5::text)
FROM locked_job l JOIN resolved_step d ON d.job_id = l.id
RETURNING task_id
"""

# Finds the step $3 of an ended job, if the outcome of the step's order is unknown.
_FIND = f"""
-- resolve_find
SELECT t.id AS task_id, t.epoch, n.value AS note, j.status AS job_status FROM job j
JOIN task t ON t.job_id = j.id AND t.step = $3 JOIN note n ON n.task_id = t.id
WHERE j.id = $1 AND j.tenant_id = $2 AND {IS_UNKNOWN.format(intent="$4", now="clock_timestamp()")}
"""
# The same as `_FIND`, but it also locks the job's row until the transaction ends.
_LOCK = f"""{_FIND.replace("resolve_find", "resolve_lock")}FOR UPDATE OF j
"""

# Writes the value of a step that does not run again.
_RECORD = """
-- resolve_record
INSERT INTO result (task_id, value) VALUES ($1, $2) ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
"""

# Writes a decision. If the step has a decision for this epoch already, the statement writes and returns nothing.
_SETTLE = """
-- settlement_write
INSERT INTO settlement (task_id, epoch, job_id, tenant_id, action, system, ref, actor)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
ON CONFLICT (task_id, epoch) DO NOTHING
RETURNING true
"""

_LATEST = """
-- settlement_latest
SELECT s.action, s.ref, s.actor, s.at FROM settlement s WHERE s.job_id = $1 AND s.tenant_id = $2
ORDER BY s.at DESC LIMIT 1
"""

# Finds the jobs of other tenants that have adopted the order $3 of the system $2. The table has one row for each
# decision of a person, so it has only a few thousand rows. This statement may read all of them.
_ADOPTERS = """
-- settlement_adopters
SELECT j.params FROM settlement s JOIN job j ON j.id = s.job_id
WHERE s.ref = $3 AND s.system = $2 AND s.tenant_id <> $1
"""


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A step that only a person can settle. `note`: what its last attempt wrote down for the next attempt. A member of
    the note records that the step was about to order. `job_status`: how the job has ended. Only a failed job can run
    again.
    """

    task_id: UUID
    epoch: int
    note: Mapping[str, Any]
    job_status: JobState


async def lock(connection: Connection, job_id: UUID, tenant_id: str, step: str, intent: str) -> Unresolved | None:
    """The step, if its job has ended and the outcome of its order is unknown. Call this in the transaction that settles
    the step. `intent`: the member of the step's note that records the order. Returns None if the job has no such order,
    or has changed since the caller read it.
    """
    return _unresolved(await connection.fetchrow(_LOCK, job_id, tenant_id, step, intent))


async def find(connection: Connection, job_id: UUID, tenant_id: str, step: str, intent: str) -> Unresolved | None:
    """Returns the same as `lock`, but locks nothing, so the job may change at any moment."""
    return _unresolved(await connection.fetchrow(_FIND, job_id, tenant_id, step, intent))


def _unresolved(row: Any) -> Unresolved | None:
    return None if row is None else Unresolved(row["task_id"], row["epoch"], row["note"], JobState(row["job_status"]))


async def write(
    connection: Connection,
    job_id: UUID,
    tenant_id: str,
    failed: Unresolved,
    action: Action,
    actor: str,
    *,
    system: str | None = None,
    ref: str | None = None,
) -> bool:
    """Write the settlement (the person's decision). `actor`: the person. `system`: the provider. `ref`: the id of the
    adopted order at this provider. Returns False, and writes nothing, if somebody has already settled this failure.

    Raises Conflict `order_adopted` if another job of the tenant has adopted this order.
    """
    try:
        async with connection.transaction():  # a savepoint
            return bool(
                await connection.fetchval(
                    _SETTLE, failed.task_id, failed.epoch, job_id, tenant_id, action, system, ref, actor
                )
            )
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != "settlement_adopted":
            raise
        raise Conflict("order_adopted", "Another job has this order.") from None


async def lock_order(connection: Connection, ref: str) -> None:
    """Let only one transaction at a time adopt an order with this id. Call this before the transaction locks a job."""
    await lock_name(connection, f"adopted order {ref}")


async def other_adopters(connection: Connection, tenant_id: str, system: str, ref: str) -> list[Mapping[str, Any]]:
    """The parameters of the jobs of other tenants that have adopted this order."""
    return [row["params"] for row in await connection.fetch(_ADOPTERS, tenant_id, system, ref)]


async def latest(connection: Connection, job_id: UUID, tenant_id: str) -> Any:
    """The job's latest settlement: action, ref, actor, at. None: nobody has settled a step of the job."""
    return await connection.fetchrow(_LATEST, job_id, tenant_id)


async def resolve(
    connection: Connection, job_id: UUID, tenant_id: str, step: str, value: Mapping[str, Any], by: str
) -> bool:
    """Set one failed step of a failed job to succeeded, with a value. `by`: the person. Call this only if another step
    of the job needs this step, because otherwise no step would be left to run. Afterwards call `replay` in the same
    transaction, so that the job goes on with the next steps. Returns False if the job or the step has not failed.
    """
    return await connection.fetchval(RESOLVE, job_id, tenant_id, step, value, by) is not None


async def record(connection: Connection, unresolved: Unresolved, value: Mapping[str, Any]) -> None:
    """Write the value of a step whose job does not run again. The states of the step and of the job do not change.
    (`write` writes the person's decision.)
    """
    await connection.execute(_RECORD, unresolved.task_id, value)


async def forget_note(connection: Connection, failed: Unresolved) -> None:
    """Delete the step's note, so that the next attempt starts without it."""
    await connection.execute("DELETE FROM note WHERE task_id = $1", failed.task_id)
