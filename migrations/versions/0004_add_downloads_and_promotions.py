"""add downloads and promotions

Revision ID: 0004
Revises: 0003
May run before the new code: yes; it only adds a table and columns that may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("conversion", sa.Column("promoting_until", sa.TIMESTAMP(timezone=True), nullable=True))
    op.add_column("conversion", sa.Column("promoted", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.create_table(
        "download",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_prefix", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "started_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("lapses_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("finished_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("download_pkey")),
    )
    op.create_index("download_of_key", "download", ["key_prefix", "started_at"], unique=False)
    op.create_index("download_started", "download", ["started_at"], unique=False)


def downgrade() -> None:
    op.drop_table("download")
    op.drop_column("conversion", "promoted")
    op.drop_column("conversion", "promoting_until")
