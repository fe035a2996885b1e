"""index external jobs

Revision ID: 0033_external_jobs
Revises: 0032_cancels_of_workflows
May run before the new code: yes; it adds an index of unfinished jobs with external steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

from leasehold.db.upgrading.index_builds import build_index

revision: str = "0033_external_jobs"
down_revision: str | None = "0032_cancels_of_workflows"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    build_index("job_external", "job", ["tenant_id", "id"], where="finished_at IS NULL AND external > 0")


def downgrade() -> None:
    op.drop_index("job_external", table_name="job")
