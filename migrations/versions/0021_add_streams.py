"""add streams

Revision ID: 0021_streams
Revises: 0020_logs
May run before the new code: yes; it adds a table and a column with a constant default.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision: str = "0021_streams"
down_revision: str | None = "0020_logs"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column(
        "tail", sa.Column("stream_seq", sa.BigInteger(), server_default="0", nullable=False), if_not_exists=True
    )
    op.create_table(
        "job_stream",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("restarts", sa.Boolean(), nullable=False),
        sa.Column("chunks", JSONB(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "last", name="job_stream_pkey"),
        sa.UniqueConstraint("task_id", "epoch", "first", name="job_stream_once"),
        sa.ForeignKeyConstraint(["job_id"], ["tail.job_id"], name="job_stream_job_id_fkey", ondelete="CASCADE"),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("job_stream")
    op.drop_column("tail", "stream_seq")
