"""add settlements

Revision ID: 0027_settlements
Revises: 0026_tags_of_schedules
May run before the new code: yes; it only adds a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0027_settlements"
down_revision: str | None = "0026_tags_of_schedules"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "settlement",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("system", sa.Text(), nullable=True),
        sa.Column("ref", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("action IN ('adopt', 'again', 'give_up')", name=op.f("settlement_action_known")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="settlement_job_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "epoch", name="settlement_pkey"),
    )
    op.create_index("settlement_job", "settlement", ["job_id"])
    op.create_index(
        "settlement_adopted",
        "settlement",
        ["tenant_id", "system", "ref"],
        unique=True,
        postgresql_where=sa.text("ref IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_table("settlement")
