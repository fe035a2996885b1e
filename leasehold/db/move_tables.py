"""Declares the table of tenants that move to another cell, which is another installation (`leasehold cells move`)."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, CheckConstraint, Column, Table, Text, func

from leasehold.db.tables import metadata

#: Moves of tenants. The old cell has a row `out`, and the new cell a row `in`, which is written with the tenant's rows.
tenant_move = Table(
    "tenant_move",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("from_cell", Text, nullable=False),
    Column("to_cell", Text, nullable=False),
    Column("direction", Text, nullable=False),  # out | in
    Column("stage", Text, nullable=False),  # out: drain, copy, switch, moved; in: live (see cli/moving.py)
    Column("started_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    CheckConstraint("direction IN ('out', 'in')", name="direction_known"),
    CheckConstraint("stage IN ('drain', 'copy', 'switch', 'moved', 'live')", name="stage_known"),
)
