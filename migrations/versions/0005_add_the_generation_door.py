"""add the generation door

Revision ID: 0005
Revises: 0004
May run before the new code: yes; it only adds tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "generation",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("server_id", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("consumed_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('image', 'video')", name=op.f("generation_kind_check")),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("generation_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("generation_pkey")),
    )
    op.create_index("generation_task_id", "generation", ["tenant_id", "task_id"], unique=True)
    op.create_table(
        "source_image",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("source_image_pkey")),
    )
    op.create_index("source_image_expires", "source_image", ["expires_at"], unique=False)


def downgrade() -> None:
    op.drop_table("source_image")
    op.drop_table("generation")
