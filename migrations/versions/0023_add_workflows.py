"""add workflows

Revision ID: 0023_workflows
Revises: 0022_audit
May run before the new code: yes; it adds tables, and columns whose defaults are what older code means.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

from leasehold.db.upgrading.index_builds import end_transaction

revision: str = "0023_workflows"
down_revision: str | None = "0022_audit"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    op.add_column("task", sa.Column("news", sa.Integer(), server_default="0", nullable=False), if_not_exists=True)
    op.add_column("task", sa.Column("wake_at", sa.Integer(), nullable=True), if_not_exists=True)
    op.add_column(
        "task", sa.Column("contained", sa.Boolean(), server_default="false", nullable=False), if_not_exists=True
    )
    end_transaction()
    op.create_table(
        "journal",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("branch", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("value", postgresql.JSONB(), nullable=True),
        sa.Column("child_id", sa.Uuid(), nullable=True),
        sa.Column("due_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=_NOW, nullable=False),
        sa.CheckConstraint(
            "kind IN ('run', 'sleep', 'signal', 'start', 'result', 'call', 'patch')",
            name=op.f("journal_kind_known"),
        ),
        sa.CheckConstraint("state IN ('open', 'done', 'failed', 'timed_out')", name=op.f("journal_state_known")),
        sa.PrimaryKeyConstraint("job_id", "branch", "number", name="journal_pkey"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="journal_job_id_fkey", ondelete="CASCADE"),
    )
    op.create_index(
        "journal_child",
        "journal",
        ["child_id"],
        postgresql_where=sa.text("kind IN ('start', 'result') AND state = 'open'"),
    )
    op.create_index(
        "journal_waits", "journal", ["job_id", "name"],
        postgresql_where=sa.text("kind = 'signal' AND state = 'open'"),
    )  # fmt: skip
    op.create_table(
        "signal",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=_NOW, nullable=False),
        sa.PrimaryKeyConstraint("id", name="signal_pkey"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="signal_job_id_fkey", ondelete="CASCADE"),
    )
    op.create_index("signal_job_id", "signal", ["job_id", "id"])


def downgrade() -> None:
    op.drop_table("signal")
    op.drop_table("journal")
    op.drop_column("task", "contained")
    op.drop_column("task", "wake_at")
    op.drop_column("task", "news")
