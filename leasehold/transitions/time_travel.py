"""For tests of an app only: time passes for the rows, and nobody sleeps."""

from __future__ import annotations

from datetime import timedelta

from leasehold.db.database import Connection

#: What falls due, by table. Leases are left out: a running worker renews them by the real clock.
_DUE = {
    "job": ("deadline_at", "expires_at"),
    "task": ("available_at",),
    "gate_job": ("ready_at", "admitted_at"),
    "journal": ("due_at",),
    "idempotency": ("locked_until", "expires_at"),
    "quarantine": ("retry_at",),
}


# A tick that time has passed over is due now, and not missed by as long.
_TICKS = """
-- time_travel_ticks
UPDATE schedule SET next_run_at = greatest(next_run_at - $1::interval, least(next_run_at, clock_timestamp()))
"""


async def let_pass(connection: Connection, time: timedelta) -> None:
    """Move every due time of the database back by `time`. Only for a database that no worker uses meanwhile."""
    async with connection.transaction():
        for table, columns in _DUE.items():
            moved = ", ".join(f"{column} = {column} - $1::interval" for column in columns)
            await connection.execute(f"UPDATE {table} SET {moved}", time)
        await connection.execute(_TICKS, time)
