"""keep late events

Revision ID: 0047_late_events
Revises: 0046_hints_together
May run before the new code: yes; it only changes the function of a trigger. Code of any age reads `kept_event` by the
view `history`.

The trigger `derived_events` writes an event with the time at which a step was claimed or completed, which may be weeks
ago. A sweeper that drops a day first moves the events of existing jobs out of it (leasehold/db/history.py). An event
that the trigger wrote between the move and the drop was lost with the day. So the trigger writes events that are older
than a day where nothing is dropped, into `kept_event`. `drop_event_day` refuses today and yesterday.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0047_late_events"
down_revision: str | None = "0046_hints_together"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = "job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data"


def _has_claim(row: str) -> str:
    """SQL: the row of `task` says when and by whom its task was first claimed."""
    return (
        f"{row}.claim_seq IS NOT NULL AND {row}.epoch = 1 AND coalesce({row}.lease_owner, {row}.claimed_by) IS NOT NULL"
    )


def _has_completion(row: str) -> str:
    """SQL: the row of `task` says when its task was completed, by its first attempt."""
    return f"{row}.done_seq IS NOT NULL AND {row}.epoch = 1 AND {row}.status = 'succeeded'"


_CLAIM = """SELECT OLD.job_id, OLD.claim_seq, OLD.started_at, OLD.tenant_id, 'claimed', 'running', OLD.id, OLD.step,
       'running', 1, jsonb_build_object('worker', coalesce(OLD.lease_owner, OLD.claimed_by), 'attempt', 1)"""
_COMPLETION = """SELECT OLD.job_id, OLD.done_seq, OLD.finished_at, OLD.tenant_id, 'completed', 'succeeded', OLD.id,
       OLD.step, 'succeeded', 1, NULL::jsonb"""
_OLDEST = "clock_timestamp() - interval '1 day'"


def _written(at: str, event: str, *, keeps_late: bool) -> str:
    """SQL: write the event, whose time is `at`."""
    insert = f"INSERT INTO event ({_COLUMNS})\n        {event};"
    if not keeps_late:
        return insert
    return f"""IF {at} < {_OLDEST} THEN
            INSERT INTO kept_event ({_COLUMNS})
            {event};
        ELSE
            {insert}
        END IF;"""


def _function(*, keeps_late: bool) -> str:
    return f"""
CREATE OR REPLACE FUNCTION write_derived_events() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF ({_has_claim("OLD")}) AND NOT ({_has_claim("NEW")}) THEN
        {_written("OLD.started_at", _CLAIM, keeps_late=keeps_late)}
    END IF;
    IF ({_has_completion("OLD")}) AND NOT ({_has_completion("NEW")}) THEN
        {_written("OLD.finished_at", _COMPLETION, keeps_late=keeps_late)}
    END IF;
    RETURN NULL;
END
$body$
"""


# CREATE OR REPLACE takes the settings of the function away. The function finds its tables whatever search_path the
# session has.
_PATH = """
DO $do$
BEGIN
    EXECUTE format('ALTER FUNCTION write_derived_events() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END
$do$
"""


def upgrade() -> None:
    op.execute(_function(keeps_late=True))
    op.execute(_PATH)


def downgrade() -> None:
    op.execute(_function(keeps_late=False))
    op.execute(_PATH)
