"""write less for a job

Revision ID: 0037_less_for_a_job
Revises: 0036_saved_views
May run before the new code: yes; the index of deadlines that it builds serves the older code, too. It replaces an index
that also held every living job without a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

from leasehold.db.upgrading.index_builds import build_index, drop_index

revision: str = "0037_less_for_a_job"
down_revision: str | None = "0036_saved_views"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_OLD, _NEW = "job_deadline", "job_overdue"


def upgrade() -> None:
    op.execute("ALTER TABLE job SET (fillfactor = 50)")
    build_index(_NEW, "job", ["deadline_at"], where="deadline_at IS NOT NULL AND finished_at IS NULL")
    drop_index(_OLD)


def downgrade() -> None:
    build_index(_OLD, "job", ["deadline_at"], where="finished_at IS NULL")
    drop_index(_NEW)
    op.execute("ALTER TABLE job SET (fillfactor = 80)")
