"""own promoted objects

Revision ID: 0011_promoted_objects
Revises: 0010_quarantine
May run before the new code: yes; it only adds a table. Old code promotes to keys without a tenant's folder meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0011_promoted_objects"
down_revision: str | None = "0010_quarantine"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "promoted_object",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("turn", sa.Uuid(), nullable=True),
        sa.Column("for_job", sa.Uuid(), nullable=True),
        sa.Column("until", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("reached", sa.Text(), nullable=True),
        sa.Column("backup", sa.Text(), nullable=True),
        sa.CheckConstraint("reached IN ('created', 'unsure', 'replaced')", name=op.f("promoted_object_reached_known")),
        sa.CheckConstraint(
            "(turn IS NULL) = (until IS NULL) AND (turn IS NULL) = (for_job IS NULL)",
            name=op.f("promoted_object_turn_ends"),
        ),
        sa.CheckConstraint(
            "(reached = 'replaced') <= (backup IS NOT NULL)", name=op.f("promoted_object_replaced_has_backup")
        ),
        sa.PrimaryKeyConstraint("key", name=op.f("promoted_object_pkey")),
    )
    op.create_index(
        "promoted_object_turn",
        "promoted_object",
        ["for_job", "until"],
        unique=False,
        postgresql_where=sa.text("turn IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_table("promoted_object")
