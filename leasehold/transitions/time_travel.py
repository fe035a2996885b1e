"""Moves the instants in a database back, and ends leases, so that a test of an app need not wait. Only tests use it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from leasehold.db.database import Connection

#: Table -> its columns that move: the times at which something is due, and the times at which something has happened.
#: The latter move, too, so that code that subtracts an earlier instant from a later one (for example, a workflow with
#: `ctx.now()`) sees that the time has passed. Leases are left out, because a running worker renews its leases by the
#: real clock.
_MOVED = {
    "job": ("deadline_at", "expires_at", "created_at", "started_at", "finished_at", "cancel_by"),
    "run": ("scheduled_at",),
    "task": ("available_at", "started_at", "finished_at"),
    "gate_job": ("ready_at", "admitted_at"),
    "journal": ("due_at", "at"),
    "signal": ("at",),
    "schedule": ("updated_at",),  # a schedule counts the runs that have failed since this instant
    "idempotency": ("locked_until", "expires_at"),
    "quarantine": ("retry_at",),
    "rate_bucket": ("full_at",),
}

#: Table -> its JSON column whose field `at` moves. In the journal, `at` says when a signal came, or when an awaited run
#: ended. In a job, `at` says when its cancel was requested.
_MOVED_JSON = {"journal": "value", "job": "cancel"}

# $1 the time that passes. If the next tick of a schedule (the time at which it fires) lies within this time, the tick
# moves to the present, and not into the past. So it counts as on time, and not as missed.
_TICKS = """
-- time_travel_ticks
UPDATE schedule SET next_run_at = greatest(next_run_at - $1::interval, least(next_run_at, clock_timestamp()))
WHERE next_run_at IS NOT NULL
"""

# $1 the time that passes, $2 pipelines.
_EXPIRIES = """
-- time_travel_expiries
UPDATE job SET params = jsonb_set(params, '{expires}', to_jsonb((params ->> 'expires')::timestamptz - $1::interval))
WHERE pipeline = ANY($2::text[]) AND params ->> 'expires' IS NOT NULL
"""


async def let_pass(connection: Connection, time: timedelta, expiring: Sequence[str] = ()) -> None:
    """Move the instants in _MOVED and _MOVED_JSON, and the due times of schedules, back by `time`. `expiring`: the
    pipelines whose parameter `expires` is an instant. This instant also moves. Call this only for a database that no
    worker uses meanwhile.
    """
    async with connection.transaction():
        for table, columns in _MOVED.items():
            moved = ", ".join(f"{column} = {column} - $1::interval" for column in columns)
            await connection.execute(f"UPDATE {table} SET {moved}", time)
        for table, column in _MOVED_JSON.items():
            moved = f"jsonb_set({column}, '{{at}}', to_jsonb(({column} ->> 'at')::timestamptz - $1::interval))"
            await connection.execute(f"UPDATE {table} SET {column} = {moved} WHERE {column} ? 'at'", time)
        await connection.execute(_TICKS, time)
        if expiring:
            await connection.execute(_EXPIRIES, time, list(expiring))


_END_LEASES = """
-- time_travel_end_leases
WITH leaders AS (DELETE FROM leadership)
UPDATE task SET lease_until = clock_timestamp() - interval '1 hour' WHERE status = 'running'
"""


async def end_leases(connection: Connection) -> None:
    """End the leases of all workers, and the term of their leader. Call this only for a database whose workers have all
    died.
    """
    await connection.execute(_END_LEASES)
