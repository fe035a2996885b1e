"""analyze grown tables

Revision ID: 0051_grown_tables
Revises: 0050_source_bytes
May run before the new code: yes; it only adds a function.

Why the platform does not leave this to autovacuum: leasehold/db/statistics.py. Only the owner of a table may analyse it, so
this function runs as whoever migrates, and does nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0051_grown_tables"
down_revision: str | None = "0050_source_bytes"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# Up to 32 pages (some thousand rows of `task`), reading a whole index costs little. From 16,384 pages (128 MiB) on, a
# table takes long to double, and autovacuum comes in time. `relpages`: the pages that the table had when its statistics
# were made.
#
# Partitions are left out: a day of events is found by its key, whatever the statistics say.
#
# SKIP_LOCKED: autovacuum stops working on a table if another session waits for it.
_DEFINITION = """
CREATE FUNCTION analyze_grown_tables() RETURNS text[] LANGUAGE plpgsql SECURITY DEFINER AS $body$
DECLARE
    grown record;
    names text[] := '{}';
BEGIN
    FOR grown IN
        SELECT sized.*
        FROM (
            SELECT c.oid, c.oid::regclass::text AS name, c.relpages,
                   pg_relation_size(c.oid) / current_setting('block_size')::int AS pages
            FROM pg_class c
            WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'event'::regclass)
              AND c.relkind = 'r' AND NOT c.relispartition AND c.relowner = current_user::regrole
        ) AS sized
        WHERE sized.pages > 32 AND sized.pages > 2 * sized.relpages AND sized.pages < 16384
    LOOP
        EXECUTE 'ANALYZE (SKIP_LOCKED) ' || grown.name;
        IF EXISTS (SELECT FROM pg_class c WHERE c.oid = grown.oid AND c.relpages > grown.relpages) THEN
            names := names || grown.name;
        END IF;
    END LOOP;
    RETURN names;
END
$body$
"""

# pg_temp comes last: otherwise a caller's temporary table could stand in for ours.
_PATH = """
DO $do$
BEGIN
    EXECUTE format('ALTER FUNCTION analyze_grown_tables() SET search_path = pg_catalog, %I, pg_temp', current_schema());
END
$do$
"""


def upgrade() -> None:
    op.execute(_DEFINITION)
    op.execute(_PATH)
    op.execute("REVOKE ALL ON FUNCTION analyze_grown_tables() FROM PUBLIC")


def downgrade() -> None:
    op.execute("DROP FUNCTION analyze_grown_tables()")
