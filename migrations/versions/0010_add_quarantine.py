"""add quarantine

Revision ID: 0010_quarantine
Revises: 0009_gate_owners
May run before the new code: yes; it only adds a table and a column with a default.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0010_quarantine"
down_revision: str | None = "0009_gate_owners"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "quarantine",
        sa.Column("duty", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "failed_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("retry_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("duty", "unit", name=op.f("quarantine_pkey")),
    )
    op.add_column("schedule", sa.Column("failures", sa.Integer(), server_default="0", nullable=False))


def downgrade() -> None:
    op.drop_column("schedule", "failures")
    op.drop_table("quarantine")
