"""count the starts of workers by queue

Revision ID: 0039_starts_of_workers
Revises: 0038_deleted_versions
May run before the new code: yes; it only adds a column, which PostgreSQL does without writing a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision: str = "0039_starts_of_workers"
down_revision: str | None = "0038_deleted_versions"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("starts_per_minute", JSONB(), server_default="{}", nullable=False))


def downgrade() -> None:
    op.drop_column("worker", "starts_per_minute")
