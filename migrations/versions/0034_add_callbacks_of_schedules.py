"""add callbacks of schedules

Revision ID: 0034_callbacks_of_schedules
Revises: 0033_external_jobs
May run before the new code: yes; it adds a column that may be NULL.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0034_callbacks_of_schedules"
down_revision: str | None = "0033_external_jobs"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("schedule", sa.Column("callback_url", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("schedule", "callback_url")
