"""Statements about the leases of one worker. Its heartbeat calls `renew`, which extends the leases, and `to_cancel`,
which finds the attempts that must stop. `owned`, `owned_before` and `lock_unlocked` find and lock tasks that a worker
owns according to their rows. The worker then releases these tasks (worker/leases/orphans.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.domain.lease import Lease

# $1 is the owner, $2 and $3 are the tasks and epochs of its leases, and $4 is the new duration. The statement does not
# renew a lease whose row another transaction has locked, because that transaction may be settling the task. Until the
# settlement, such a lease stays valid. `unindexed`: PostgreSQL finds the task by its id, and uses no partial index for
# the condition.
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
    `is_valid`: False only if the lease is lost. `must_stop`: the attempt must stop, because its job is being cancelled.
    """

    task_id: UUID
    renewed: bool
    is_valid: bool
    must_stop: bool


async def renew(connection: Connection, owner: UUID, leases: Sequence[Lease], ttl: float) -> list[Renewal]:
    """running -> running with a later `lease_until`, for each lease that is still valid. `ttl`: the new duration, in
    seconds.
    """
    rows = await connection.fetch(
        RENEW, owner, [lease.task_id for lease in leases], [lease.epoch for lease in leases], timedelta(seconds=ttl)
    )
    return [Renewal(row["id"], row["renewed"], row["is_valid"], row["cancel"]) for row in rows]


# $1 is the owner, and $2 are the tasks of its leases. A job with `cancel_by` that has not finished is being cancelled.
CANCELLED = f"""
-- cancelled
SELECT t.id FROM unnest($2::uuid[]) AS lease(id) JOIN task t ON t.id = lease.id JOIN job j ON j.id = t.job_id
WHERE t.lease_owner = $1 AND t.cancelable AND {unindexed("t.status = 'running'")}
  AND {unindexed("j.cancel_by IS NOT NULL AND j.finished_at IS NULL")}
"""


async def to_cancel(connection: Connection, owner: UUID, task_ids: Iterable[UUID]) -> list[UUID]:
    """The tasks among `task_ids` that `owner` must stop: each is cancelable, and its job is being cancelled. The query
    is cheap enough for two calls a second.
    """
    return [row["id"] for row in await connection.fetch(CANCELLED, owner, list(task_ids))]


_OWNED = """
-- owned
SELECT t.id, t.epoch FROM task t WHERE t.status = 'running' AND t.lease_owner = $1
"""


async def owned(connection: Connection, owner: UUID) -> dict[UUID, int]:
    """The running tasks of `owner`: task -> epoch. Call this only when a worker ends, because the query reads the
    running tasks of all workers.
    """
    return {row["id"]: row["epoch"] for row in await connection.fetch(_OWNED, owner)}


# $1 is the owner, $2 is the instant, and $3 is the duration of a lease. A claim or a renewal sets `lease_until` to its
# own time plus $3. So a lease that ends before $2 + $3 was claimed before $2, and was not renewed since $2.
_OWNED_BEFORE = """
-- owned_before
SELECT t.id, t.epoch FROM task t
WHERE t.status = 'running' AND t.lease_owner = $1 AND t.lease_until < $2::timestamptz + $3::interval
"""


async def owned_before(connection: Connection, owner: UUID, instant: datetime, ttl: float) -> dict[UUID, int]:
    """The running tasks of `owner` that were claimed before `instant` and not renewed since: task -> epoch.

    `ttl`: the duration of a lease, in seconds. Call this only after a reconnect or a lost answer, because the query
    reads the running tasks of all workers.
    """
    rows = await connection.fetch(_OWNED_BEFORE, owner, instant, timedelta(seconds=ttl))
    return {row["id"]: row["epoch"] for row in rows}


# Locks the tasks $1 and their jobs. The statement leaves out a task if another transaction has locked the row of the
# task or of its job.
_LOCK_UNLOCKED = """
-- lock_unlocked
SELECT t.id FROM task t JOIN job j ON j.id = t.job_id
WHERE t.id = ANY($1::uuid[])
ORDER BY j.id, t.id
FOR UPDATE OF j, t SKIP LOCKED
"""


async def lock_unlocked(connection: Connection, tasks: Iterable[UUID]) -> set[UUID]:
    """Lock the tasks and their jobs, except each task that another transaction has locked, or whose job it has locked.
    Returns the tasks that are now locked. Call this in a transaction. Then this transaction can settle the returned
    tasks without waiting for another transaction.
    """
    return {row["id"] for row in await connection.fetch(_LOCK_UNLOCKED, list(tasks))}
