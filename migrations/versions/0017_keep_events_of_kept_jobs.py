"""keep events of kept jobs

Revision ID: 0017_kept_events
Revises: 0016_dedupe_keys
May run before the new code: yes; it only adds a table and a view. Older code drops days as it did.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0017_kept_events"
down_revision: str | None = "0016_dedupe_keys"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = "job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data"


def upgrade() -> None:
    op.create_table(
        "kept_event",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("job_status", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=True),
        sa.Column("step", sa.Text(), nullable=True),
        sa.Column("task_status", sa.Text(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("data", postgresql.JSONB(), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "seq", name="kept_event_pkey"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="kept_event_job_id_fkey", ondelete="CASCADE"),
    )
    op.execute(f"CREATE VIEW history AS SELECT {_COLUMNS} FROM event UNION ALL SELECT {_COLUMNS} FROM kept_event")


def downgrade() -> None:
    op.execute("DROP VIEW history")
    op.drop_table("kept_event")
