"""add callbacks

Revision ID: 0028_callbacks
Revises: 0027_settlements
May run before the new code: yes; it only adds tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0028_callbacks"
down_revision: str | None = "0027_settlements"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "job_callback",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("delivery_id", sa.Uuid(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="job_callback_job_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name="job_callback_pkey"),
    )
    op.create_table(
        "callback_secret",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("secrets", sa.ARRAY(sa.LargeBinary()), nullable=False),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("tenant_id", name="callback_secret_pkey"),
    )


def downgrade() -> None:
    op.drop_table("callback_secret")
    op.drop_table("job_callback")
