"""Declares the tables of the audit. The API and the workers log in to PostgreSQL with a database role that may add rows
to the audit, but not change or delete them (roles.py).

A trigger gives each row its place in its tenant's chain when the transaction commits (migration 0022).
"""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, BigInteger, CheckConstraint, Column, Index, LargeBinary, Table, Text, Uuid, func, text

from leasehold.db.tables import metadata

audit = Table(
    "audit",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("tenant_id", Text, nullable=False),  # the chain of the row; `*`: the act concerns all tenants, or none
    Column("actor_kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("actor_tenant", Text),  # the actor's own tenant; an operator may act on objects of other tenants
    Column("key_prefix", Text),  # of the API key; NULL: no key was used
    Column("action", Text, nullable=False),  # for example `job.cancelled`
    Column("target_kind", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("source_ip", Text),
    Column("request_id", Text),
    Column("details", Text, nullable=False),  # the exact JSON text that the hash covers
    # Only the trigger writes these: the row's number in its chain, the previous row's hash, and this row's hash.
    Column("seq", BigInteger),
    Column("previous", LargeBinary),
    Column("hash", LargeBinary),
    CheckConstraint("actor_kind IN ('key', 'person', 'command', 'platform')", name="actor_kind_known"),
    Index("audit_place", "tenant_id", "seq", unique=True),
    Index("audit_newest", text("at DESC"), text("id DESC")),
    Index("audit_tenant_newest", "tenant_id", text("at DESC"), text("id DESC")),
    Index("audit_target", "target", text("at DESC"), text("id DESC")),
    Index("audit_actor", "actor", text("at DESC"), text("id DESC")),
    Index("audit_action", "action", text("at DESC"), text("id DESC")),
)

#: The two ends of each chain. `seq` and `hash`: the number and the hash of the chain's last row. `first_seq`: the
#: number of the first row that retention has not deleted. `first_previous`: the hash of the row before that row.
audit_chain = Table(
    "audit_chain",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("seq", BigInteger, nullable=False, server_default="0"),
    Column("hash", LargeBinary, nullable=False, server_default=""),
    Column("first_seq", BigInteger, nullable=False, server_default="1"),
    Column("first_previous", LargeBinary, nullable=False, server_default=""),
    postgresql_with={"fillfactor": "50"},
)
