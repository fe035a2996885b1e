"""Declares the table of saved views: filters of jobs that people of a tenant have saved under a name."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, Column, Table, Text, UniqueConstraint, Uuid, func

from leasehold.db.tables import metadata

saved_view = Table(
    "saved_view",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("filter", Text, nullable=False),
    Column("saved_by", Text, nullable=False),  # the client or the person who saved it last
    Column("saved_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    UniqueConstraint("tenant_id", "name", name="saved_view_name"),
)
