"""add the audit

Revision ID: 0022_audit
Revises: 0021_streams
May run before the new code: yes; it only adds tables and functions.

A transaction inserts the row of its act. When it commits, the trigger gives the row its place in its tenant's chain:
number, hash of the row before, own hash. The chain's lock is therefore the last that a transaction takes, and it is held
for the commit alone: no act waits for another inside its work, and none can deadlock with the chain. The trigger and
`forget_audit` run as whoever migrates; the role of the API and the workers can add rows, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0022_audit"
down_revision: str | None = "0021_streams"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# pg_temp comes last: otherwise a caller's temporary table could stand in for ours.
_PATH = """
DO $do$
BEGIN
    EXECUTE format('ALTER FUNCTION {function} SET search_path = pg_catalog, %I, pg_temp', current_schema());
END
$do$
"""

# As leasehold/domain/audit.py: each field with its length in bytes.
_FIELD = """
CREATE FUNCTION audit_field(value text) RETURNS text LANGUAGE sql IMMUTABLE AS $body$
    SELECT coalesce(octet_length(convert_to(value, 'UTF8')) || ':' || value, '-') || ','
$body$
"""

_HASH = """
CREATE FUNCTION audit_hash(a audit) RETURNS bytea LANGUAGE sql STABLE AS $body$
    SELECT sha256(convert_to(
        audit_field(encode(a.previous, 'hex')) || audit_field(a.seq::text)
        || audit_field((extract(epoch FROM a.at) * 1000000)::bigint::text)
        || audit_field(a.tenant_id) || audit_field(a.actor_kind) || audit_field(a.actor)
        || audit_field(a.actor_tenant) || audit_field(a.key_prefix) || audit_field(a.action)
        || audit_field(a.target_kind) || audit_field(a.target) || audit_field(a.source_ip)
        || audit_field(a.request_id) || audit_field(a.details), 'UTF8'))
$body$
"""

_LINK = """
CREATE FUNCTION audit_link() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $body$
DECLARE
    head audit_chain;
    linked audit := NEW;
BEGIN
    SELECT * INTO head FROM audit_chain WHERE tenant_id = NEW.tenant_id FOR UPDATE;
    IF NOT FOUND THEN
        INSERT INTO audit_chain (tenant_id) VALUES (NEW.tenant_id) ON CONFLICT (tenant_id) DO NOTHING;
        SELECT * INTO head FROM audit_chain WHERE tenant_id = NEW.tenant_id FOR UPDATE;
    END IF;
    linked.seq := head.seq + 1;
    linked.previous := head.hash;
    linked.hash := audit_hash(linked);
    UPDATE audit SET seq = linked.seq, previous = linked.previous, hash = linked.hash WHERE id = NEW.id;
    UPDATE audit_chain SET seq = linked.seq, hash = linked.hash WHERE tenant_id = NEW.tenant_id;
    RETURN NULL;
END
$body$
"""

_TRIGGER = """
CREATE CONSTRAINT TRIGGER audit_link AFTER INSERT ON audit
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION audit_link()
"""

# Only from the beginning of a chain on, and never a row of the last 30 days: so a stolen password of the API hides
# nothing that is new. A row that is older than a row before it waits for that row.
_FORGET = """
CREATE FUNCTION forget_audit(days int, at_most int) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $body$
DECLARE
    until timestamptz := clock_timestamp() - make_interval(days => days);
    chain audit_chain;
    last bigint;
    kept_hash bytea;
    deleted bigint := 0;
BEGIN
    IF days IS NULL OR days < 30 OR at_most IS NULL OR at_most < 1 THEN
        RAISE invalid_parameter_value USING MESSAGE = 'rows of the audit are kept for 30 days at least';
    END IF;
    FOR chain IN
        SELECT c.* FROM audit_chain c
        WHERE c.tenant_id IN (SELECT a.tenant_id FROM audit a WHERE a.at < until ORDER BY a.at LIMIT at_most)
        ORDER BY c.tenant_id FOR UPDATE SKIP LOCKED
    LOOP
        last := least(chain.seq, chain.first_seq + at_most - 1);
        last := coalesce((SELECT min(a.seq) - 1 FROM audit a
                          WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN chain.first_seq AND last
                            AND a.at >= until), last);
        SELECT a.hash INTO kept_hash FROM audit a WHERE a.tenant_id = chain.tenant_id AND a.seq = last;
        CONTINUE WHEN last < chain.first_seq OR kept_hash IS NULL;
        DELETE FROM audit a WHERE a.tenant_id = chain.tenant_id AND a.seq BETWEEN chain.first_seq AND last;
        UPDATE audit_chain c SET first_seq = last + 1, first_previous = kept_hash WHERE c.tenant_id = chain.tenant_id;
        deleted := deleted + last - chain.first_seq + 1;
    END LOOP;
    RETURN deleted;
END
$body$
"""

_FUNCTIONS = (
    ("audit_field(text)", _FIELD),
    ("audit_hash(audit)", _HASH),
    ("audit_link()", _LINK),
    ("forget_audit(int, int)", _FORGET),
)


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("actor_kind", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("actor_tenant", sa.Text(), nullable=True),
        sa.Column("key_prefix", sa.Text(), nullable=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target_kind", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("source_ip", sa.Text(), nullable=True),
        sa.Column("request_id", sa.Text(), nullable=True),
        sa.Column("details", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=True),
        sa.Column("previous", sa.LargeBinary(), nullable=True),
        sa.Column("hash", sa.LargeBinary(), nullable=True),
        sa.CheckConstraint(
            "actor_kind IN ('key', 'person', 'command', 'platform')", name=op.f("audit_actor_kind_known")
        ),
        sa.PrimaryKeyConstraint("id", name="audit_pkey"),
    )
    op.create_index("audit_place", "audit", ["tenant_id", "seq"], unique=True)
    newest = [sa.text("at DESC"), sa.text("id DESC")]
    op.create_index("audit_newest", "audit", newest)
    for name, column in (
        ("tenant_newest", "tenant_id"),
        ("target", "target"),
        ("actor", "actor"),
        ("action", "action"),
    ):
        op.create_index(f"audit_{name}", "audit", [column, *newest])
    op.create_table(
        "audit_chain",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("hash", sa.LargeBinary(), server_default="", nullable=False),
        sa.Column("first_seq", sa.BigInteger(), server_default="1", nullable=False),
        sa.Column("first_previous", sa.LargeBinary(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name="audit_chain_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    for signature, definition in _FUNCTIONS:
        op.execute(definition)
        op.execute(_PATH.format(function=signature))
        op.execute(f"REVOKE ALL ON FUNCTION {signature} FROM PUBLIC")
    op.execute(_TRIGGER)


def downgrade() -> None:
    op.execute("DROP TRIGGER audit_link ON audit")
    for signature, _ in reversed(_FUNCTIONS):
        op.execute(f"DROP FUNCTION {signature}")
    op.drop_table("audit_chain")
    op.drop_table("audit")
