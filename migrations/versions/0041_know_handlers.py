"""record which handlers the workers have, and when a worker with each was last seen

Revision ID: 0041_know_handlers
Revises: 0040_move_tenants
May run before the new code: yes; it only adds a table, and a column, which PostgreSQL does without writing a row. A
worker of an older release leaves the column empty: it may have any handler.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0041_know_handlers"
down_revision: str | None = "0040_move_tenants"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("handlers", postgresql.ARRAY(sa.Text()), nullable=True))
    op.create_table(
        "known_handler",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="known_handler_pkey"),
    )


def downgrade() -> None:
    op.drop_table("known_handler")
    op.drop_column("worker", "handlers")
