"""add times of waiting

Revision ID: 0015_times_of_waiting
Revises: 0014_deleted_media
May run before the new code: yes; it only adds columns that may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015_times_of_waiting"
down_revision: str | None = "0014_deleted_media"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("timeout_seconds", sa.Integer(), nullable=True))
    op.add_column("job", sa.Column("start_within_seconds", sa.Integer(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "start_within_seconds")
    op.drop_column("job", "timeout_seconds")
