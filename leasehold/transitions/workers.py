"""Who is working: the registry of workers, presence, and the lease on being the sweeper."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from leasehold.db.database import Connection

#: First half of the advisory lock that a worker holds while it lives; the second is its `presence_key`.
PRESENCE = 7_305


async def register(
    connection: Connection, worker: UUID, *, host: str, pid: int, version: str, queues: Sequence[str]
) -> int:
    """Add a worker that has just started, not yet present; returns its presence key."""
    key: int = await connection.fetchval(
        "INSERT INTO worker (id, present, host, pid, version, queues) VALUES ($1, false, $2, $3, $4, $5)"
        " RETURNING presence_key",
        worker,
        host,
        pid,
        version,
        list(queues),
    )
    return key


async def serves(connection: Connection, worker: UUID, queues: Sequence[str]) -> None:
    """The worker takes work of these queues from now on, and of no others."""
    await connection.execute("UPDATE worker SET queues = $2 WHERE id = $1", worker, list(queues))


async def appear(connection: Connection, worker: UUID, presence_key: int) -> bool:
    """Take the presence lock on this very session, and say so in the registry.

    The kernel closes the socket of a process that dies and PostgreSQL drops the lock, so that everybody knows
    at once. False: somebody else holds it (a session of ours that has not ended yet): try again.
    """
    if not await connection.fetchval("SELECT pg_try_advisory_lock($1, $2)", PRESENCE, presence_key):
        return False
    await connection.execute("UPDATE worker SET present = true, seen_at = clock_timestamp() WHERE id = $1", worker)
    return True


async def seen(connection: Connection, worker: UUID) -> bool:
    """The worker lives. True: an operator asks it to drain."""
    return bool(
        await connection.fetchval(
            "UPDATE worker SET seen_at = clock_timestamp() WHERE id = $1 RETURNING draining", worker
        )
    )


async def ask_to_drain(connection: Connection, worker: UUID) -> bool:
    """It stops taking work, finishes or gives back what it has, and ends. False: no such worker."""
    return bool(await connection.fetchval("UPDATE worker SET draining = true WHERE id = $1 RETURNING true", worker))


async def hide(connection: Connection, worker: UUID) -> None:
    """Presence proves nothing for this worker from now on (its session is lost): only its leases do."""
    await connection.execute("UPDATE worker SET present = false WHERE id = $1", worker)


async def unregister(connection: Connection, worker: UUID) -> None:
    await connection.execute("DELETE FROM worker WHERE id = $1", worker)


# The session of worker w is there.
_IS_THERE = f"""EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = {PRESENCE}::oid AND l.objid = w.presence_key::oid)"""

# A server that has just started, or that has ended all its sessions because one of them crashed (which resets its
# statistics), has no sessions of anybody yet: workers come back within a second or two.
GONE = f"""
-- gone
SELECT w.id FROM worker w
WHERE w.present AND NOT {_IS_THERE}
  AND greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter))
      < clock_timestamp() - interval '10 seconds'
"""


def is_of_gone(owners: str) -> str:
    """SQL: the lease of task `t` is of one of the array `owners`, and that one's session is still not there.

    They were seen to be gone a moment ago; on a slow link that is long enough to come back, and to claim anew.
    """
    return f"""t.lease_owner = ANY(ARRAY(
    SELECT was.id FROM unnest({owners}) AS was(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = was.id AND {_IS_THERE})))"""


async def gone(connection: Connection) -> list[UUID]:
    """Workers that were present and whose session has ended. A wrong guess is harmless: leases are fenced."""
    return [row["id"] for row in await connection.fetch(GONE)]


async def forget_workers(connection: Connection, silent: float) -> None:
    """Delete workers unseen for `silent` seconds that hold no lease."""
    await connection.execute(
        "DELETE FROM worker w WHERE w.seen_at < clock_timestamp() - $1::interval"
        " AND NOT EXISTS (SELECT 1 FROM task t WHERE t.status = 'running' AND t.lease_owner = w.id)",
        timedelta(seconds=silent),
    )


# While another leads there is nothing to insert, and so nothing to lock: asking is cheap.
_LEAD = f"""
-- lead
WITH gone AS MATERIALIZED ({GONE})
INSERT INTO leadership (role, owner, until)
SELECT $1, $2, clock_timestamp() + $3::interval
WHERE NOT EXISTS (
    SELECT 1 FROM leadership l
    WHERE l.role = $1 AND l.owner <> $2 AND l.until >= clock_timestamp() AND l.owner NOT IN (SELECT id FROM gone)
)
ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, until = excluded.until
WHERE leadership.owner = excluded.owner OR leadership.until < clock_timestamp()
   OR leadership.owner IN (SELECT id FROM gone)
RETURNING true
"""


async def lead(connection: Connection, role: str, owner: UUID, ttl: float) -> bool:
    """Become, or stay, the one that does `role` for the next `ttl` seconds. A worker whose presence has ended leads
    no more.
    """
    return bool(await connection.fetchval(_LEAD, role, owner, timedelta(seconds=ttl)))


async def resign(connection: Connection, owner: UUID) -> None:
    await connection.execute("DELETE FROM leadership WHERE owner = $1", owner)


async def gone_owner(connection: Connection, task_id: UUID) -> UUID | None:
    """The owner of the task's lease, if its presence has ended."""
    owner: UUID | None = await connection.fetchval(
        "SELECT lease_owner FROM task WHERE id = $1 AND status = 'running'", task_id
    )
    return owner if owner is not None and owner in await gone(connection) else None
