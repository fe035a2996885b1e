"""derive the events of jobs with a single task

Revision ID: 0044_derived_events
Revises: 0043_single_tasks
May run before the new code: yes; it only adds columns, a trigger, and rows to a view. The older code writes every event
as it did. Where it changes a task whose events are derived, the trigger writes those events.

Most jobs have one step, which one worker claims and completes. The rows of the job and of its task have all that the
three events of such a job would: so the new code does not write these events, and `history` derives them. PostgreSQL
evaluates the condition of the trigger at each update of its columns. The function runs only when the rows lose what an
event needs, for example when the step fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0044_derived_events"
down_revision: str | None = "0043_single_tasks"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = "job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data"
_WRITTEN = f"SELECT {_COLUMNS} FROM event UNION ALL SELECT {_COLUMNS} FROM kept_event"


def _has_claim(row: str) -> str:
    """SQL: the row of `task` says when and by whom its task was first claimed."""
    return (
        f"{row}.claim_seq IS NOT NULL AND {row}.epoch = 1 AND coalesce({row}.lease_owner, {row}.claimed_by) IS NOT NULL"
    )


def _has_completion(row: str) -> str:
    """SQL: the row of `task` says when its task was completed, by its first attempt."""
    return f"{row}.done_seq IS NOT NULL AND {row}.epoch = 1 AND {row}.status = 'succeeded'"


def _claim(job_id: str, tenant_id: str, task: str) -> str:
    """SQL: the columns of the event `claimed`."""
    return f"""{job_id}, {task}.claim_seq, {task}.started_at, {tenant_id}, 'claimed', 'running', {task}.id, {task}.step,
       'running', 1, jsonb_build_object('worker', coalesce({task}.lease_owner, {task}.claimed_by), 'attempt', 1)"""


def _completion(job_id: str, tenant_id: str, task: str) -> str:
    """SQL: the columns of the event `completed`."""
    return f"""{job_id}, {task}.done_seq, {task}.finished_at, {tenant_id}, 'completed', 'succeeded', {task}.id, {task}.step,
       'succeeded', 1, NULL::jsonb"""


_DERIVED = f"""
SELECT j.id, 1, j.created_at, j.tenant_id, 'submitted', 'queued', NULL::uuid, NULL::text, NULL::text, NULL::int,
       NULL::jsonb
FROM job j WHERE j.single_task IS NOT NULL
UNION ALL
SELECT {_claim("j.id", "j.tenant_id", "t")}
FROM job j JOIN task t ON t.id = j.single_task WHERE {_has_claim("t")}
UNION ALL
SELECT {_completion("j.id", "j.tenant_id", "t")}
FROM job j JOIN task t ON t.id = j.single_task WHERE {_has_completion("t")}
"""

_FUNCTION = f"""
CREATE FUNCTION write_derived_events() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF ({_has_claim("OLD")}) AND NOT ({_has_claim("NEW")}) THEN
        INSERT INTO event ({_COLUMNS})
        SELECT {_claim("OLD.job_id", "OLD.tenant_id", "OLD")};
    END IF;
    IF ({_has_completion("OLD")}) AND NOT ({_has_completion("NEW")}) THEN
        INSERT INTO event ({_COLUMNS})
        SELECT {_completion("OLD.job_id", "OLD.tenant_id", "OLD")};
    END IF;
    RETURN NULL;
END
$body$
"""

# The function finds the table `event` whatever search_path the session has.
_PATH = """
DO $do$
BEGIN
    EXECUTE format('ALTER FUNCTION write_derived_events() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END
$do$
"""

_TRIGGER = f"""
CREATE TRIGGER derived_events AFTER UPDATE OF status, epoch, lease_owner, claimed_by, claim_seq, done_seq ON task
FOR EACH ROW
WHEN ((({_has_claim("OLD")}) AND NOT ({_has_claim("NEW")}))
      OR (({_has_completion("OLD")}) AND NOT ({_has_completion("NEW")})))
EXECUTE FUNCTION write_derived_events()
"""


def upgrade() -> None:
    op.add_column("task", sa.Column("claim_seq", sa.Integer(), nullable=True))
    op.add_column("task", sa.Column("done_seq", sa.Integer(), nullable=True))
    op.add_column("task", sa.Column("claimed_by", sa.Uuid(), nullable=True))
    op.execute(_FUNCTION)
    op.execute(_PATH)
    op.execute(_TRIGGER)
    op.execute(f"CREATE OR REPLACE VIEW history AS {_WRITTEN} UNION ALL {_DERIVED}")


def downgrade() -> None:
    op.execute(f"INSERT INTO event ({_COLUMNS}) {_DERIVED}")
    op.execute("UPDATE job SET single_task = NULL WHERE single_task IS NOT NULL")  # else a later upgrade derives again
    op.execute(f"CREATE OR REPLACE VIEW history AS {_WRITTEN}")
    op.execute("DROP TRIGGER derived_events ON task")
    op.execute("DROP FUNCTION write_derived_events()")
    op.drop_column("task", "claimed_by")
    op.drop_column("task", "done_seq")
    op.drop_column("task", "claim_seq")
