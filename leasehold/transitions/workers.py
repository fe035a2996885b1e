"""Registers workers, tracks their presence, and elects leaders. A worker is present while its database session holds an
advisory lock. A leader is the one worker that has a role, such as the sweeper's, which frees the tasks of lost workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from leasehold.db.database import Connection, row_count

#: The advisory lock that a living worker holds (its presence) has two keys. This is the first key. It may be any number
#: that no other advisory lock has. The second key is the worker's `presence_key`.
PRESENCE = 7_305
#: A worker with more handlers than this has none of them in its row.
MAX_HANDLERS = 1000
#: The table `known_handler` has the handlers of ended workers. They show when a worker last had the code of a step. A
#: handler is kept for _REMEMBERED_DAYS, and at most _MAX_REMEMBERED handlers are kept.
_REMEMBERED_DAYS, _MAX_REMEMBERED = 90, 10_000


# An incarnation is one life of the PostgreSQL server. This SQL names the present incarnation by the time at which it
# began. That is the server's last start, or its last recovery from a crash of one session. Such a crash ends all
# sessions and resets the statistics; `stats_reset` shows when. When an incarnation ends, all its sessions end, and
# PostgreSQL drops their presence locks. A failover changes the incarnation, because the standby started at another time
# than the primary.
INCARNATION = "greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter))"


async def register(
    connection: Connection,
    worker: UUID,
    *,
    host: str,
    pid: int,
    version: str,
    queues: Sequence[str],
    slots: Sequence[int] | None = None,
    pool: str = "default",
    handlers: Sequence[str] | None = None,
    draining: bool = False,
) -> int:
    """Register a worker, if it is not registered. Returns its presence key. `slots`: how many attempts the worker runs
    at once for each of `queues`, in the same order. `pool`: the group of workers that an autoscaler scales together.
    `handlers`: the `pipeline.step` of each step that the worker has code for. If there are more than MAX_HANDLERS, none
    is recorded. `draining`: the worker claims no more tasks. If the worker is registered and its row says that it
    drains, it still drains, even if `draining` is False.

    A worker with a new row does not count as present before it calls `appear`.
    """
    key: int = await connection.fetchval(
        "INSERT INTO worker (id, present, host, pid, version, queues, slots, pool, handlers, draining)"
        " VALUES ($1, false, $2, $3, $4, $5, $6, $7, $8, $9)"
        " ON CONFLICT (id) DO UPDATE SET seen_at = clock_timestamp(), draining = worker.draining OR excluded.draining"
        " RETURNING presence_key",
        worker,
        host,
        pid,
        version,
        list(queues),
        slots,
        pool,
        _recorded(handlers),
        draining,
    )
    return key


async def record_served(
    connection: Connection,
    worker: UUID,
    queues: Sequence[str],
    slots: Sequence[int] | None = None,
    handlers: Sequence[str] | None = None,
) -> None:
    """Record that from now on the worker serves these queues and has code for these handlers, and no others."""
    await connection.execute(
        "UPDATE worker SET queues = $2, slots = $3, handlers = $4 WHERE id = $1",
        worker,
        list(queues),
        slots,
        _recorded(handlers),
    )


def _recorded(handlers: Sequence[str] | None) -> list[str] | None:
    """The handlers as a worker's row names them. Returns None if the row names none."""
    return None if handlers is None or len(handlers) > MAX_HANDLERS else list(handlers)


# $1 the worker, $2 the duration of a lease from now.
_KEEP_LEASES = f"""
-- keep_leases
UPDATE task t SET lease_until = clock_timestamp() + $2::interval
FROM (
    SELECT mine.id FROM task mine JOIN worker w ON w.id = mine.lease_owner
    WHERE mine.status = 'running' AND mine.lease_owner = $1 AND mine.lease_until < clock_timestamp() + $2::interval
      AND w.incarnation <> {INCARNATION}
    ORDER BY mine.id FOR UPDATE OF mine SKIP LOCKED
) AS own_task
WHERE t.id = own_task.id
"""


async def keep_leases(connection: Connection, worker: UUID, lease_seconds: float) -> None:
    """If the worker has not yet recorded this incarnation of the server, extend each of its leases to `lease_seconds`
    from now.

    Call this before `appear` and `record_alive`, which record the incarnation. Before the record, a lease of the worker
    counts as passed only ten seconds after its end (LEASE_HAS_PASSED). After the record, the worker has no such extra
    time. But it still needs a moment to renew the leases of its tasks, and to release the tasks that it does not hold
    any more.
    """
    await connection.execute(_KEEP_LEASES, worker, timedelta(seconds=lease_seconds))


async def appear(connection: Connection, worker: UUID, presence_key: int) -> bool:
    """Take the presence lock on this session, and mark the worker as present.

    When a process dies, the kernel closes its socket and PostgreSQL releases the lock. All workers can see this
    immediately. Returns False if an older session of this worker still holds the lock; try again later in this case.
    """
    if not await connection.fetchval("SELECT pg_try_advisory_lock($1, $2)", PRESENCE, presence_key):
        return False
    await connection.execute(
        f"UPDATE worker SET present = true, seen_at = clock_timestamp(), incarnation = {INCARNATION} WHERE id = $1",
        worker,
    )
    return True


async def record_alive(connection: Connection, worker: UUID, starts_per_minute: Mapping[str, int]) -> bool | None:
    """Record that the worker is alive on this incarnation of the server. Also record how many attempts it has started
    within the last minute, by queue. Returns whether an operator has asked the worker to drain; None: the worker has no
    row.
    """
    draining: bool | None = await connection.fetchval(
        f"UPDATE worker SET seen_at = clock_timestamp(), incarnation = {INCARNATION}, starts_per_minute = $2"
        " WHERE id = $1 RETURNING draining",
        worker,
        dict(starts_per_minute),
    )
    return draining


async def ask_to_drain(connection: Connection, worker: UUID) -> bool:
    """Ask the worker to drain: to claim no more tasks, to finish or release its tasks, and to end. Returns False if
    there is no such worker.
    """
    return bool(await connection.fetchval("UPDATE worker SET draining = true WHERE id = $1 RETURNING true", worker))


# SQL, the end of a statement that deletes workers: remember their handlers. The statement's CTE `ended` has the deleted
# workers, with `handlers` and `seen_at`. The rows are written in the order of their names, because otherwise two
# workers that end at the same time could deadlock.
_REMEMBER_HANDLERS = """INSERT INTO known_handler (name, seen_at)
SELECT h.name, max(ended.seen_at) FROM ended CROSS JOIN unnest(ended.handlers) AS h(name)
GROUP BY h.name ORDER BY h.name
ON CONFLICT (name) DO UPDATE SET seen_at = greatest(known_handler.seen_at, excluded.seen_at)"""

_UNREGISTER = f"""
-- unregister
WITH ended AS (DELETE FROM worker WHERE id = $1 RETURNING handlers, clock_timestamp() AS seen_at)
{_REMEMBER_HANDLERS}
"""


async def unregister(connection: Connection, worker: UUID) -> None:
    """Delete the worker's row, and remember its handlers."""
    await connection.execute(_UNREGISTER, worker)


# SQL: the worker in the row `w` of the table worker holds its presence lock.
_IS_PRESENT = f"""EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = {PRESENCE}::oid AND l.objid = w.presence_key::oid)"""

# Finds the dead workers: those that were present on this incarnation of the server, and have no session any more. A
# worker that was present only on another incarnation has not come back yet, so only its leases show whether it is
# alive. A worker of an older release records no incarnation. The query counts it as dead only after the server has run
# for ten seconds, because by then a living worker has reconnected.
DEAD = f"""
-- gone
SELECT w.id FROM worker w
WHERE w.present AND NOT {_IS_PRESENT}
  AND (w.incarnation = {INCARNATION}
       OR (w.incarnation IS NULL AND {INCARNATION} < clock_timestamp() - interval '10 seconds'))
"""

#: SQL: the lease of task `t` has passed. If its owner has not come back since a failover or a restart of the server,
#: the owner gets ten more seconds to renew or release the lease. So a failover loses no task. The subquery finds one
#: worker by its key. An EXISTS in its place could make PostgreSQL build a hash table of all workers.
LEASE_HAS_PASSED = f"""t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> {INCARNATION} FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)"""


def owner_is_dead(owners: str) -> str:
    """SQL: the owner of task `t`'s lease is in the array `owners` (an SQL expression), and still has no session.

    The caller has read a moment ago that these owners are dead. Since then an owner may have come back over a slow
    link, and may have claimed the task again.
    """
    return f"""t.lease_owner = ANY(ARRAY(
    SELECT owner.id FROM unnest({owners}) AS owner(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = owner.id AND {_IS_PRESENT})))"""


async def dead(connection: Connection) -> list[UUID]:
    """Workers that were present and whose session has ended. If such a worker is alive after all, no harm is done. When
    another worker claims its task, the task's epoch rises, and a write with the old epoch changes nothing.
    """
    return [row["id"] for row in await connection.fetch(DEAD)]


# $1: the workers that were not seen for this time are deleted.
_FORGET_WORKERS = f"""
-- forget_workers
WITH ended AS (
    DELETE FROM worker w
    WHERE w.seen_at < clock_timestamp() - $1::interval
      AND NOT EXISTS (SELECT 1 FROM task t WHERE t.status = 'running' AND t.lease_owner = w.id)
    RETURNING w.handlers, w.seen_at
)
{_REMEMBER_HANDLERS}
"""


async def forget_workers(connection: Connection, silent: float) -> None:
    """Delete the workers that hold no lease and that were not seen for `silent` seconds. Remember their handlers."""
    await connection.execute(_FORGET_WORKERS, timedelta(seconds=silent))


# $1: the handlers that were not seen for this time are deleted. $2: at most this many handlers are kept.
_FORGET_HANDLERS = """
-- forget_handlers
DELETE FROM known_handler k
WHERE k.seen_at < clock_timestamp() - $1::interval
   OR k.name IN (SELECT o.name FROM known_handler o ORDER BY o.seen_at DESC, o.name OFFSET $2)
"""


async def forget_handlers(connection: Connection) -> None:
    """Delete the handlers of workers that ended long ago, and those beyond the newest _MAX_REMEMBERED."""
    await connection.execute(_FORGET_HANDLERS, timedelta(days=_REMEMBERED_DAYS), _MAX_REMEMBERED)


# $1 the role, $2 the candidate, $3 for how long it will lead. While another process leads, the statement inserts
# nothing and locks nothing. So a candidate may try often.
_LEAD = f"""
-- lead
WITH dead AS MATERIALIZED ({DEAD})
INSERT INTO leadership (role, owner, until)
SELECT $1, $2, clock_timestamp() + $3::interval
WHERE NOT EXISTS (
    SELECT 1 FROM leadership l
    WHERE l.role = $1 AND l.owner <> $2 AND l.until >= clock_timestamp() AND l.owner NOT IN (SELECT id FROM dead)
)
ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, until = excluded.until
WHERE leadership.owner = excluded.owner OR leadership.until < clock_timestamp()
   OR leadership.owner IN (SELECT id FROM dead)
RETURNING true
"""


async def lead(connection: Connection, role: str, owner: UUID, ttl: float) -> bool:
    """Try to become or stay the leader of `role` for the next `ttl` seconds. Returns whether `owner` leads now. A
    leader that is dead does not keep others from leading.
    """
    return bool(await connection.fetchval(_LEAD, role, owner, timedelta(seconds=ttl)))


async def take_lead(connection: Connection, role: str, owner: UUID, ttl: float) -> None:
    """Become the leader of `role` for the next `ttl` seconds, even if another process leads now."""
    await connection.execute(
        "INSERT INTO leadership (role, owner, until) VALUES ($1, $2, clock_timestamp() + $3::interval)"
        " ON CONFLICT (role) DO UPDATE SET owner = excluded.owner, until = excluded.until",
        role,
        owner,
        timedelta(seconds=ttl),
    )


async def keep_lead(connection: Connection, role: str, owner: UUID, ttl: float) -> bool:
    """Stay the leader of `role` for the next `ttl` seconds. Returns False if `owner` is not the leader (any more)."""
    status = await connection.execute(
        "UPDATE leadership SET until = clock_timestamp() + $3::interval WHERE role = $1 AND owner = $2",
        role,
        owner,
        timedelta(seconds=ttl),
    )
    return row_count(status) == 1


# $1 the role.
_HAS_LEADER = """
-- has_leader
SELECT EXISTS (
    SELECT 1 FROM leadership l
    WHERE l.role = $1 AND l.until >= clock_timestamp()
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = l.owner AND w.draining)
)
"""


async def has_leader(connection: Connection, role: str) -> bool:
    """Whether somebody leads `role` and does not drain. A worker that seems dead also counts until the end of its time
    as the leader (`until`). It may have lost its session only for a moment.
    """
    return bool(await connection.fetchval(_HAS_LEADER, role))


async def resign(connection: Connection, owner: UUID) -> None:
    """Give up all roles that `owner` leads, so that other processes may lead them immediately."""
    await connection.execute("DELETE FROM leadership WHERE owner = $1", owner)


async def dead_owner(connection: Connection, task_id: UUID) -> UUID | None:
    """The owner of the task's lease, if that worker is dead."""
    owner: UUID | None = await connection.fetchval(
        "SELECT lease_owner FROM task WHERE id = $1 AND status = 'running'", task_id
    )
    return owner if owner is not None and owner in await dead(connection) else None
