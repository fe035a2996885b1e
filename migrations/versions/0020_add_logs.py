"""add logs

Revision ID: 0020_logs
Revises: 0019_tags_and_tombstones
May run before the new code: yes; it adds two tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision: str = "0020_logs"
down_revision: str | None = "0019_tags_and_tombstones"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "tail",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("log_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("job_id", name="tail_pkey"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="tail_job_id_fkey", ondelete="CASCADE"),
        postgresql_with={"fillfactor": "70"},
        if_not_exists=True,
    )
    op.create_table(
        "job_log",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("last", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("first", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("lines", JSONB(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "last", name="job_log_pkey"),
        sa.UniqueConstraint("task_id", "epoch", "first", name="job_log_once"),
        sa.ForeignKeyConstraint(["job_id"], ["tail.job_id"], name="job_log_job_id_fkey", ondelete="CASCADE"),
        if_not_exists=True,
    )


def downgrade() -> None:
    op.drop_table("job_log")
    op.drop_table("tail")
