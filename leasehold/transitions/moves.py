"""Postpones what a tenant has due, while the tenant moves to another cell, and undoes that.

Triggers (migration 0040) postpone each row that becomes due later. They exist only while a tenant moves.
"""

from __future__ import annotations

from leasehold.db.database import Connection

#: A thousand years, in hours: the difference gives the same instant again in every time zone.
POSTPONED_BY = "8766000 hours"
#: Later instants are postponed ones.
FAR = "2900-01-01+00"
#: Table -> the column with the instant at which its row is due.
DUE = {"task": "available_at", "schedule": "next_run_at"}


def stays(tenant: str = "tenant_id") -> str:
    """SQL condition: the tenant of the column does not move to another cell. Housekeeping deletes only objects whose
    tenant stays: two cells may have one bucket, and what was copied, or has moved, may be of use in the other cell.
    """
    return (
        f"NOT EXISTS (SELECT 1 FROM tenant_move m WHERE m.tenant_id = {tenant} AND m.direction = 'out'"
        " AND m.stage <> 'drain')"
    )


# The triggers change the instants.
_POSTPONE_TASKS = f"""
-- move_postpone_tasks
UPDATE task SET available_at = available_at
WHERE tenant_id = $1 AND status IN ('pending', 'retry', 'waiting') AND available_at < '{FAR}'
"""
_POSTPONE_SCHEDULES = f"""
-- move_postpone_schedules
UPDATE schedule SET next_run_at = next_run_at WHERE tenant_id = $1 AND next_run_at < '{FAR}'
"""
_RESUME_TASKS = f"""
-- move_resume_tasks
UPDATE task SET available_at = available_at - interval '{POSTPONED_BY}'
WHERE tenant_id = $1 AND available_at > '{FAR}' AND available_at < 'infinity'
"""
_RESUME_SCHEDULES = f"""
-- move_resume_schedules
UPDATE schedule SET next_run_at = next_run_at - interval '{POSTPONED_BY}'
WHERE tenant_id = $1 AND next_run_at > '{FAR}' AND next_run_at < 'infinity'
"""


async def postpone(connection: Connection, tenant_id: str) -> None:
    """Let no worker claim what the tenant has due. The triggers of the move must exist."""
    await connection.execute(_POSTPONE_TASKS, tenant_id)
    await connection.execute(_POSTPONE_SCHEDULES, tenant_id)


async def resume(connection: Connection, tenant_id: str) -> None:
    """Undo `postpone`. Call this in the transaction that has dropped the triggers."""
    await connection.execute(_RESUME_TASKS, tenant_id)
    await connection.execute(_RESUME_SCHEDULES, tenant_id)
