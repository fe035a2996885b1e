"""Declares the table of the people who sign in to the console by OpenID Connect."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, Column, Index, Integer, Table, Text, Uuid, func
from sqlalchemy.dialects.postgresql import ARRAY

from leasehold.db.tables import metadata

#: The people. A person who belongs to two tenants has a row for each tenant.
person = Table(
    "person",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("issuer", Text, nullable=False),
    Column("subject", Text, nullable=False),  # the provider's permanent id of the person
    Column("login", Text, nullable=False),  # the person's name in the audit, unique within the tenant
    Column("name", Text, nullable=False),
    # The scopes, perhaps none, that the person's groups at the provider gave at the last sign-in.
    Column("scopes", ARRAY(Text), nullable=False),
    Column("set_role", Text),  # a role that an admin gave: its scopes count instead of `scopes`
    Column("generation", Integer, nullable=False, server_default="0"),  # a session with a lower number has ended
    Column("created_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("seen_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("disabled_at", TIMESTAMP(timezone=True)),
    # The time at which `generation` last rose. A person with a session in another tenant can switch to this tenant only
    # if the sign-in of that session was later.
    Column("sessions_ended_at", TIMESTAMP(timezone=True)),
    Index("person_subject", "issuer", "subject", "tenant_id", unique=True),
    Index("person_login", "tenant_id", "login", unique=True),
    Index("person_seen", "seen_at"),
)
