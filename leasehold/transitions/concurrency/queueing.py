"""Writes and deletes the rows of concurrency limits (table `gate`), and of the jobs that wait at them or were admitted
(table `gate_job`).

There are two kinds of limits. An operator declares a limit, or a limit comes with the jobs that name it. A limit of the
second kind may follow a declared limit, for example as the limit of one value of the payload. A limit that follows has
the bounds of the declared limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, Protocol, TypeAlias
from uuid import UUID

from leasehold.db.database import Connection, row_count
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.transitions.concurrency.names import LIMIT_UNIT, LIMITS, ConcurrencyLimitName, limit_columns
from leasehold.transitions.quarantine import not_in

#: `at_most` and `per_minute` of a limit.
_Bounds: TypeAlias = tuple[int | None, int | None]


class LimitedJob(Protocol):
    """A job with concurrency limits, such as a `transitions.jobs.NewJob`. `not_before`: it must not start before this
    time.
    """

    @property
    def id(self) -> UUID: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def limits(self) -> Sequence[ConcurrencyLimit]: ...
    @property
    def not_before(self) -> datetime | None: ...


# $1 and $2: the tenants and keys of the limits. $3 and $4: their bounds (`at_most` jobs at once, `per_minute`
# admissions). Returns the limits whose rows exist and need no change, and locks these rows. Until the transaction ends,
# the lock prevents their deletion, but no other change. So admissions and other submissions do not wait for the lock.
# They must not wait, because a user's transaction that submits (`submit_in`) may stay open for long.
_KEEP_LIMITS = """
-- gates_keep
SELECT g.tenant_id, g.key
FROM unnest($1::text[], $2::text[], $3::int[], $4::int[]) AS brought(tenant_id, key, at_most, per_minute)
JOIN gate g ON g.tenant_id = brought.tenant_id AND g.key = brought.key
WHERE g.declared OR (brought.at_most IS NULL AND brought.per_minute IS NULL)
   OR (g.at_most, g.per_minute) IS NOT DISTINCT FROM (brought.at_most, brought.per_minute)
ORDER BY g.tenant_id COLLATE "C", g.key COLLATE "C"
FOR KEY SHARE OF g
"""

# The parameters are those of `_KEEP_LIMITS`. A limit that an operator declared keeps the operator's bounds. ON CONFLICT
# DO UPDATE locks each row that exists, in the order of the parameters, even if the WHERE is false and the row does not
# change.
_WRITE_LIMITS = """
-- gates_known
INSERT INTO gate (tenant_id, key, at_most, per_minute)
SELECT * FROM unnest($1::text[], $2::text[], $3::int[], $4::int[])
ON CONFLICT (tenant_id, key) DO UPDATE SET at_most = excluded.at_most, per_minute = excluded.per_minute
WHERE NOT gate.declared AND (excluded.at_most IS NOT NULL OR excluded.per_minute IS NOT NULL)
  AND (gate.at_most, gate.per_minute) IS DISTINCT FROM (excluded.at_most, excluded.per_minute)
"""

# Locks the declared limits whose bounds other limits (their followers) copy. Because of the lock, a transaction that
# changes or withdraws a declared limit waits until the followers are committed. Limits are sorted by the bytes of their
# names (COLLATE "C"), as Python sorts them. So all transactions lock them in one order, under any collation of the
# database.
_FOLLOWED = """
-- gates_followed
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS followed(tenant_id, key)
JOIN gate g ON g.tenant_id = followed.tenant_id AND g.key = followed.key AND g.declared
ORDER BY g.tenant_id COLLATE "C", g.key COLLATE "C"
FOR SHARE OF g
"""

# Adds jobs to those that wait at limits. `tenant_id` and `key` name the limit, and `owner` is the job's tenant.
# `ready_at`: the job may be admitted from this time on; NULL: now.
_QUEUE_UP = """
-- gates_queue_up
INSERT INTO gate_job (tenant_id, key, job_id, priority, ready_at, owner)
SELECT g.tenant_id, g.key, g.job_id, g.priority, coalesce(g.ready_at, clock_timestamp()), g.owner
FROM unnest($1::text[], $2::text[], $3::uuid[], $4::smallint[], $5::timestamptz[], $6::text[])
    AS g(tenant_id, key, job_id, priority, ready_at, owner)
"""


async def queue_up(connection: Connection, jobs: Sequence[LimitedJob]) -> None:
    """Let new jobs wait at their limits. Call this in the transaction that writes the jobs. Before this call, the
    caller writes the limits' rows (`write_limits` or `lock_limits`).
    """
    rows = [
        (limit.tenant_id, limit.key, job.id, job.priority, job.not_before, job.tenant_id)
        for job in jobs
        for limit in job.limits
    ]
    await connection.execute(_QUEUE_UP, *(list(column) for column in zip(*rows, strict=True)))


async def queue_up_again(connection: Connection, jobs: Sequence[LimitedJob]) -> None:
    """Let held jobs wait at other limits than before. Before this call, the caller locks first the limits
    (`lock_limits`) and then the jobs, because an admission also locks in this order.
    """
    await connection.execute("DELETE FROM gate_job WHERE job_id = ANY($1::uuid[])", [job.id for job in jobs])
    await queue_up(connection, jobs)


async def write_limits(connection: Connection, limits: Iterable[ConcurrencyLimit]) -> None:
    """Write the limits' rows. Until the caller's transaction ends, no other transaction can delete them. Only a row
    that is new, or that gets other bounds, makes other submissions and admissions wait.
    """
    by_name = _by_name(limits)
    bounds = await _bounds(connection, by_name)
    kept = {(row["tenant_id"], row["key"]) for row in await connection.fetch(_KEEP_LIMITS, *_columns(bounds))}
    if to_write := {name: own_bounds for name, own_bounds in bounds.items() if name not in kept}:
        await connection.execute(_WRITE_LIMITS, *_columns(to_write))


async def lock_limits(connection: Connection, limits: Sequence[ConcurrencyLimit]) -> None:
    """Write the limits' rows, and lock them until the caller's transaction ends. Until then, admissions wait."""
    if limits:
        await connection.execute(_WRITE_LIMITS, *_columns(await _bounds(connection, _by_name(limits))))


def _by_name(limits: Iterable[ConcurrencyLimit]) -> dict[ConcurrencyLimitName, ConcurrencyLimit]:
    """The limits by name, in the order of the names. All transactions lock in this order, because other orders could
    deadlock.
    """
    by_name = {(limit.tenant_id, limit.key): limit for limit in limits}
    return dict(sorted(by_name.items(), key=itemgetter(0)))


def _columns(bounds: Mapping[ConcurrencyLimitName, _Bounds]) -> tuple[list[Any], ...]:
    """The parameters of `_KEEP_LIMITS` and `_WRITE_LIMITS`."""
    return *limit_columns(bounds), [at_most for at_most, _ in bounds.values()], [rate for _, rate in bounds.values()]


async def _bounds(
    connection: Connection, limits: Mapping[ConcurrencyLimitName, ConcurrencyLimit]
) -> dict[ConcurrencyLimitName, _Bounds]:
    """The bounds that each limit's row gets, in the order of `limits`. A limit that follows a declared limit gets the
    present bounds of the declared limit, because the operator may have changed them since the job was made.

    The bounds (None, None) change no existing row. A limit gets these bounds in two cases. First: an operator declared
    this limit, so its row has the bounds already. Second: the operator has withdrawn the declared limit that this limit
    follows.
    """
    # If an operator declared the limit, `declared_as` is the limit's own name. If the limit follows a declared limit,
    # `declared_as` is the name of that limit. It is None if the limit has bounds of its own.
    followed_names = sorted(
        {
            limit.declared_as
            for name, limit in limits.items()
            if limit.declared_as is not None and limit.declared_as != name
        }
    )
    rows = await connection.fetch(_FOLLOWED, *limit_columns(followed_names)) if followed_names else ()
    declared_bounds = {(row["tenant_id"], row["key"]): (row["at_most"], row["per_minute"]) for row in rows}
    return {
        name: (limit.at_most, limit.per_minute)
        if limit.declared_as is None
        else declared_bounds.get(limit.declared_as, (None, None))
        for name, limit in limits.items()
    }


async def forget_admission(connection: Connection, job_id: UUID, limits: Sequence[ConcurrencyLimit]) -> None:
    """Forget that a finished job was admitted, because the job will be retried and wait at `limits` again. This
    function locks the limits first, as every admission does. From now on `per_minute` does not count the earlier
    admission.
    """
    await lock_limits(connection, limits)
    await connection.execute("DELETE FROM gate_job WHERE job_id = $1", job_id)


async def limits_of(connection: Connection, job_ids: Sequence[UUID]) -> list[ConcurrencyLimitName]:
    """The limits at which these jobs wait or were admitted. When the jobs have ended, other jobs may be admitted."""
    rows = await connection.fetch(
        "SELECT DISTINCT tenant_id, key FROM gate_job WHERE job_id = ANY($1::uuid[])", list(job_ids)
    )
    return [(row["tenant_id"], row["key"]) for row in rows]


async def with_waiting_jobs(
    connection: Connection, after: ConcurrencyLimitName, page_size: int = 200
) -> list[ConcurrencyLimitName]:
    """The limits at which jobs wait, by tenant and key: the first `page_size` limits after the limit `after`. Limits in
    quarantine (set aside after an error) are left out.
    """
    rows = await connection.fetch(
        "SELECT g.tenant_id, g.key FROM gate g WHERE (g.tenant_id, g.key) > ($1, $2) AND EXISTS ("
        "SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key AND w.admitted_at IS NULL)"
        f" AND {not_in(LIMITS, LIMIT_UNIT, 'text')} ORDER BY g.tenant_id, g.key LIMIT $3",
        *after,
        page_size,
    )
    return [(row["tenant_id"], row["key"]) for row in rows]


# This statement only locks. `_FORGET_UNUSED` then checks again, with a newer snapshot. The reason: between this
# statement's snapshot and its lock, a job may have begun to wait at a limit. SKIP LOCKED passes over limits to which a
# submission is just adding a job.
_LOCK_UNUSED = """
-- gates_unused_lock
SELECT g.tenant_id, g.key FROM gate g
WHERE NOT g.declared
  AND NOT EXISTS (SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key)
LIMIT $1
FOR UPDATE SKIP LOCKED
"""

# Deletes those of the limits $1 (tenants) and $2 (keys) that no job names.
_FORGET_UNUSED = """
-- gates_unused
DELETE FROM gate g USING unnest($1::text[], $2::text[]) AS unused(tenant_id, key)
WHERE g.tenant_id = unused.tenant_id AND g.key = unused.key
  AND NOT EXISTS (SELECT 1 FROM gate_job w WHERE w.tenant_id = g.tenant_id AND w.key = g.key)
"""


async def forget_unused_limits(connection: Connection, batch_size: int = 1000) -> bool:
    """Delete the rows of jobs that ended over a minute ago. Also delete the limits that no job names and no operator
    declared. Returns whether more rows may be due.
    """
    status = await connection.execute(
        "DELETE FROM gate_job WHERE (tenant_id, key, job_id) IN (SELECT g.tenant_id, g.key, g.job_id FROM gate_job g"
        " JOIN job j ON j.id = g.job_id WHERE j.finished_at < clock_timestamp() - interval '60 seconds' LIMIT $1)",
        batch_size,
    )
    async with connection.transaction():
        unused = [(row["tenant_id"], row["key"]) for row in await connection.fetch(_LOCK_UNUSED, batch_size)]
        await connection.execute(_FORGET_UNUSED, *limit_columns(unused))
    return max(row_count(status), len(unused)) >= batch_size
