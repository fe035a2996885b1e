"""The table of the people who sign in to the console by OpenID Connect."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, Column, Index, Integer, Table, Text, Uuid, func
from sqlalchemy.dialects.postgresql import ARRAY

from leasehold.db.tables import metadata

#: Somebody within one tenant: who is in two tenants has two rows.
person = Table(
    "person",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("issuer", Text, nullable=False),
    Column("subject", Text, nullable=False),  # who it is to the provider, for good
    Column("login", Text, nullable=False),  # who it is in the audit: unique within the tenant
    Column("name", Text, nullable=False),
    Column(
        "scopes", ARRAY(Text), nullable=False
    ),  # what the provider's groups gave at the last sign-in; empty: nothing
    Column("set_role", Text),  # set by an admin: it counts instead of `scopes`
    Column("generation", Integer, nullable=False, server_default="0"),  # sessions of an older one have ended
    Column("created_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("seen_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("disabled_at", TIMESTAMP(timezone=True)),
    Index("person_subject", "issuer", "subject", "tenant_id", unique=True),
    Index("person_login", "tenant_id", "login", unique=True),
    Index("person_seen", "seen_at"),
)
