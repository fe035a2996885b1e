"""forget the audit over a gap in a chain

Revision ID: 0053_forget_audit
Revises: 0052_webhook_disabled_at
May run before the new code: yes; it only replaces a function.

`forget_audit` chooses the tenants with the oldest rows. It deleted nothing of a chain in which the row was missing up to
which it would delete: somebody may have deleted old rows by hand. Once such a chain had `at_most` old rows, the function
chose that tenant alone, and no row of any tenant was deleted any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0053_forget_audit"
down_revision: str | None = "0052_webhook_disabled_at"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_WHOLE = """
        last := least(chain.seq, chain.first_seq + at_most - 1);
        last := coalesce((SELECT min(a.seq) - 1 FROM audit a
                          WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN chain.first_seq AND last
                            AND a.at >= until), last);
        SELECT a.hash INTO kept_hash FROM audit a WHERE a.tenant_id = chain.tenant_id AND a.seq = last;
        CONTINUE WHEN last < chain.first_seq OR kept_hash IS NULL;
        DELETE FROM audit a WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN chain.first_seq AND last;"""
# `first`: the first row that is there. `last`: the last one that is there and may go.
_OVER_GAPS = """
        SELECT min(a.seq) INTO first FROM audit a WHERE a.tenant_id = chain.tenant_id AND a.seq >= chain.first_seq;
        last := first + at_most - 1;
        last := coalesce((SELECT min(a.seq) - 1 FROM audit a
                          WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN first AND last
                            AND a.at >= until), last);
        SELECT a.seq, a.hash INTO last, kept_hash FROM audit a
        WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN first AND last ORDER BY a.seq DESC LIMIT 1;
        CONTINUE WHEN kept_hash IS NULL;
        DELETE FROM audit a WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN first AND last;"""


# Only from the beginning of a chain on, and never a row of the last 30 days: so a stolen password of the API hides
# nothing that is new. A row that is older than a row before it waits for that row.
def _function(deletion: str) -> str:
    return f"""
CREATE OR REPLACE FUNCTION forget_audit(days int, at_most int) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER AS $body$
DECLARE
    until timestamptz := clock_timestamp() - make_interval(days => days);
    chain audit_chain;
    first bigint;
    last bigint;
    kept_hash bytea;
    deleted bigint := 0;
    part bigint;
BEGIN
    IF days IS NULL OR days < 30 OR at_most IS NULL OR at_most < 1 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rows of the audit are kept for 30 days at least';
    END IF;
    FOR chain IN
        SELECT c.* FROM audit_chain c
        WHERE c.tenant_id IN (SELECT a.tenant_id FROM audit a WHERE a.at < until ORDER BY a.at LIMIT at_most)
        ORDER BY c.tenant_id FOR UPDATE SKIP LOCKED
    LOOP{deletion}
        GET DIAGNOSTICS part = ROW_COUNT;
        deleted := deleted + part;
        UPDATE audit_chain c SET first_seq = last + 1, first_previous = kept_hash WHERE c.tenant_id = chain.tenant_id;
    END LOOP;
    RETURN deleted;
END
$body$
"""


# CREATE OR REPLACE takes the settings of the function away. pg_temp comes last: otherwise a caller's temporary table could
# stand in for ours.
_PATH = """
DO $do$
BEGIN
    EXECUTE format('ALTER FUNCTION forget_audit(int, int) SET search_path = pg_catalog, %I, pg_temp', current_schema());
END
$do$
"""


def upgrade() -> None:
    op.execute(_function(_OVER_GAPS))
    op.execute(_PATH)


def downgrade() -> None:
    op.execute(_function(_WHOLE))
    op.execute(_PATH)
