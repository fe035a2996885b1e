"""The statements of a worker's heartbeat. `renew` extends its leases. `to_cancel` finds the attempts that must stop.
`owned_before` finds leases that the worker does not know of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.domain.lease import Lease

# $1 the owner, $2 and $3 the tasks and epochs of its leases, $4 the new duration. The statement passes over a row that
# another transaction has locked, because that transaction may be settling the task. Such a lease stays valid, but this
# call does not renew it. `unindexed`: PostgreSQL uses no partial index for the condition.
RENEW = f"""
-- renew
WITH lease AS (
    SELECT l.id, l.epoch FROM unnest($2::uuid[], $3::int[]) AS l(id, epoch)
), locked_tasks AS MATERIALIZED (
    SELECT t.id
    FROM lease JOIN task t ON t.id = lease.id
    WHERE t.lease_owner = $1 AND t.epoch = lease.epoch AND {unindexed("t.status = 'running'")}
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), renewed_tasks AS (
    UPDATE task t SET lease_until = clock_timestamp() + $4::interval
    FROM locked_tasks WHERE t.id = locked_tasks.id
    RETURNING t.id
)
SELECT lease.id,
       renewed_tasks.id IS NOT NULL AS renewed,
       coalesce(t.status = 'running' AND t.lease_owner = $1 AND t.epoch = lease.epoch, false) AS is_valid,
       coalesce(j.status = 'cancel_requested' AND t.cancelable, false) AS cancel
FROM lease
LEFT JOIN renewed_tasks ON renewed_tasks.id = lease.id
LEFT JOIN task t ON t.id = lease.id
LEFT JOIN job j ON j.id = t.job_id
"""


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer for one lease. `renewed`: False if the lease is lost, or if another transaction has locked the row.
    `is_valid`: False if the lease is lost. `must_stop`: the attempt must stop, because its job is being cancelled.
    """

    task_id: UUID
    renewed: bool
    is_valid: bool
    must_stop: bool


async def renew(connection: Connection, owner: UUID, leases: Sequence[Lease], ttl: float) -> list[Renewal]:
    """running -> running with a later `lease_until`, for each lease that is still valid."""
    rows = await connection.fetch(
        RENEW, owner, [lease.task_id for lease in leases], [lease.epoch for lease in leases], timedelta(seconds=ttl)
    )
    return [Renewal(row["id"], row["renewed"], row["is_valid"], row["cancel"]) for row in rows]


# $1 the owner, $2 the tasks of its leases.
CANCELLED = f"""
-- cancelled
SELECT t.id FROM unnest($2::uuid[]) AS lease(id) JOIN task t ON t.id = lease.id JOIN job j ON j.id = t.job_id
WHERE t.lease_owner = $1 AND t.cancelable AND {unindexed("t.status = 'running'")}
  AND {unindexed("j.cancel_by IS NOT NULL AND j.finished_at IS NULL")}
"""


async def to_cancel(connection: Connection, owner: UUID, task_ids: Iterable[UUID]) -> list[UUID]:
    """Those of `task_ids` that `owner` must stop, because the task is cancelable and its job is being cancelled. The
    query is cheap enough for two calls a second.
    """
    return [row["id"] for row in await connection.fetch(CANCELLED, owner, list(task_ids))]


_OWNED = """
-- owned
SELECT t.id, t.epoch FROM task t WHERE t.status = 'running' AND t.lease_owner = $1
"""


async def owned(connection: Connection, owner: UUID) -> dict[UUID, int]:
    """The running tasks of `owner`, with their epochs. Call this only at the end of a worker, because the query reads
    all running tasks.
    """
    return {row["id"]: row["epoch"] for row in await connection.fetch(_OWNED, owner)}


# $1 the owner, $2 the instant, $3 the duration of a lease. A lease that ends before $2 + $3 was claimed before $2, and
# was not renewed since.
_OWNED_BEFORE = """
-- owned_before
SELECT t.id, t.epoch FROM task t
WHERE t.status = 'running' AND t.lease_owner = $1 AND t.lease_until < $2::timestamptz + $3::interval
"""


async def owned_before(connection: Connection, owner: UUID, instant: datetime, ttl: float) -> dict[UUID, int]:
    """The running tasks of `owner`, with their epochs, whose leases were neither claimed nor renewed since `instant`.

    Call this only after a reconnect, because the query reads all running tasks.
    """
    rows = await connection.fetch(_OWNED_BEFORE, owner, instant, timedelta(seconds=ttl))
    return {row["id"]: row["epoch"] for row in rows}


# Locks the tasks $1 and their jobs. The statement passes over a task if another transaction has locked the row of the
# task or of its job.
_LOCK_UNLOCKED = """
-- lock_unlocked
SELECT t.id FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = ANY($1::uuid[])
ORDER BY j.id, t.id
FOR UPDATE OF j, t SKIP LOCKED
"""


async def lock_unlocked(connection: Connection, tasks: Iterable[UUID]) -> set[UUID]:
    """Lock the tasks and their jobs. A task is left out if another transaction has locked it or its job. Returns the
    locked tasks. Call this in a transaction. A later settlement of the locked tasks in this transaction then waits for
    no other transaction.
    """
    return {row["id"] for row in await connection.fetch(_LOCK_UNLOCKED, list(tasks))}
