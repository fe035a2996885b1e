"""add refusals of operations

Revision ID: 0024_refusals_of_operations
Revises: 0023_workflows
May run before the new code: yes; it adds a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0024_refusals_of_operations"
down_revision: str | None = "0023_workflows"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "operation_refusal",
        sa.Column("operation_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("operation_id", "job_id", name="operation_refusal_pkey"),
        sa.ForeignKeyConstraint(
            ["operation_id"], ["job.id"], name="operation_refusal_operation_id_fkey", ondelete="CASCADE"
        ),
    )


def downgrade() -> None:
    op.drop_table("operation_refusal")
