"""add saved views

Revision ID: 0036_saved_views
Revises: 0035_pools_of_workers
May run before the new code: yes; it only adds a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0036_saved_views"
down_revision: str | None = "0035_pools_of_workers"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "saved_view",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("filter", sa.Text(), nullable=False),
        sa.Column("saved_by", sa.Text(), nullable=False),
        sa.Column("saved_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="saved_view_pkey"),
        sa.UniqueConstraint("tenant_id", "name", name="saved_view_name"),
    )


def downgrade() -> None:
    op.drop_table("saved_view")
