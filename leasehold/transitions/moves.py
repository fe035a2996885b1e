"""While a tenant moves to another cell (an installation of its own), none of its tasks and schedules may become due
here. `postpone` moves their due times by a thousand years; `resume` moves them back.

Triggers (migration 0040) postpone each due time that is written later. They exist only while a tenant moves.
"""

from __future__ import annotations

from leasehold.db.database import Connection

#: A thousand years in hours. Hours have a fixed length and years do not, so `resume` restores the same instant in every
#: time zone.
POSTPONED_BY = "8766000 hours"
#: A due time after this instant was either postponed, or named by a client for its run.
FAR = "2900-01-01+00"
#: Table -> the column with the instant at which a row of the table is due.
DUE = {"task": "available_at", "schedule": "next_run_at"}
#: Table -> SQL condition: a client has named the due time of the table's row `t`.
_NAMED_BY_CLIENT = {
    "task": "EXISTS (SELECT 1 FROM run r WHERE r.job_id = t.job_id AND r.scheduled_at = t.available_at)",
    "schedule": "false",
}


def is_postponed(table: str) -> str:
    """SQL condition: the due time of the row `t` of this table has been postponed. The due time `infinity` (a workflow
    that waits without a time limit) is never postponed.
    """
    due_time = f"t.{DUE[table]}"
    return f"{due_time} > '{FAR}' AND {due_time} < 'infinity' AND NOT {_NAMED_BY_CLIENT[table]}"


def tenant_stays(tenant: str = "tenant_id") -> str:
    """SQL condition: the tenant in the column `tenant` does not move to another cell, and has not moved there. In the
    first stage of a move, `drain`, nothing is copied yet, so the tenant counts as staying.

    Housekeeping deletes only objects of tenants that stay. Two cells may use the same bucket, and then the other cell
    may need the objects of a tenant that moves or has moved.
    """
    return (
        f"NOT EXISTS (SELECT 1 FROM tenant_move m WHERE m.tenant_id = {tenant} AND m.direction = 'out'"
        " AND m.stage <> 'drain')"
    )


# The two statements that postpone write each due time unchanged. The triggers react to the write, and postpone the due
# time.
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
UPDATE task t SET available_at = t.available_at - interval '{POSTPONED_BY}'
WHERE t.tenant_id = $1 AND {is_postponed("task")}
"""
_RESUME_SCHEDULES = f"""
-- move_resume_schedules
UPDATE schedule t SET next_run_at = t.next_run_at - interval '{POSTPONED_BY}'
WHERE t.tenant_id = $1 AND {is_postponed("schedule")}
"""


async def postpone(connection: Connection, tenant_id: str) -> None:
    """Postpone the tenant's tasks and schedules, so that no worker claims or fires them. The triggers must exist."""
    await connection.execute(_POSTPONE_TASKS, tenant_id)
    await connection.execute(_POSTPONE_SCHEDULES, tenant_id)


async def resume(connection: Connection, tenant_id: str) -> None:
    """Undo `postpone`. Call this in the transaction that has dropped the triggers."""
    await connection.execute(_RESUME_TASKS, tenant_id)
    await connection.execute(_RESUME_SCHEDULES, tenant_id)
