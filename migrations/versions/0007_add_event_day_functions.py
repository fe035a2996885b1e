"""add event day functions

Revision ID: 0007_event_days
Revises: 0006_quota_keys
May run before the new code: yes; it only adds functions.

The API and the workers may connect as a role that cannot change the schema. Days of events are partitions, which only
their owner can make and drop; so these two functions run as whoever migrates, and do nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0007_event_days"
down_revision: str | None = "0006_quota_keys"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# pg_temp comes last: otherwise a caller's temporary table could stand in for ours.
_PATH = """
DO $do$
BEGIN
    EXECUTE format('ALTER FUNCTION {function}(date) SET search_path = pg_catalog, %I, pg_temp', current_schema());
END
$do$
"""

_ADD = """
CREATE FUNCTION add_event_day(day date) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $body$
DECLARE
    today date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
BEGIN
    IF day IS NULL OR day NOT BETWEEN today AND today + 31 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'a day of events is made for today and the 31 days after it';
    END IF;
    EXECUTE format(
        'CREATE TABLE IF NOT EXISTS %I.%I PARTITION OF event FOR VALUES FROM (%L) TO (%L)',
        (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'event'::regclass),
        'event_' || to_char(day, 'YYYYMMDD'),
        day::timestamp AT TIME ZONE 'UTC',
        (day + 1)::timestamp AT TIME ZONE 'UTC'
    );
END
$body$
"""

_DROP = """
CREATE FUNCTION drop_event_day(day date) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $body$
DECLARE
    found regclass;
BEGIN
    IF day IS NULL OR day >= (clock_timestamp() AT TIME ZONE 'UTC')::date - 1 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'events of today, yesterday and later days are not dropped';
    END IF;
    SELECT i.inhrelid::regclass INTO found FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'event'::regclass AND c.relname = 'event_' || to_char(day, 'YYYYMMDD');
    IF found IS NOT NULL THEN
        EXECUTE 'DROP TABLE ' || found::text;
    END IF;
END
$body$
"""


def upgrade() -> None:
    for function, definition in (("add_event_day", _ADD), ("drop_event_day", _DROP)):
        op.execute(definition)
        op.execute(_PATH.format(function=function))
        op.execute(f"REVOKE ALL ON FUNCTION {function}(date) FROM PUBLIC")


def downgrade() -> None:
    op.execute("DROP FUNCTION drop_event_day(date)")
    op.execute("DROP FUNCTION add_event_day(date)")
