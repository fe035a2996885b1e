"""add declared schedules

Revision ID: 0025_declared_schedules
Revises: 0024_refusals_of_operations
May run before the new code: yes; it adds a column without a default, and an index of rows that no older release writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from leasehold.db.upgrading.index_builds import build_index

revision: str = "0025_declared_schedules"
down_revision: str | None = "0024_refusals_of_operations"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("schedule", sa.Column("declared_by", sa.Text(), nullable=True), if_not_exists=True)
    build_index(
        "schedule_declared",
        "schedule",
        ["tenant_id", "declared_by", "template"],
        unique=True,
        where="declared_by IS NOT NULL",
    )


def downgrade() -> None:
    op.drop_index("schedule_declared", table_name="schedule", if_exists=True)
    op.drop_column("schedule", "declared_by", if_exists=True)
