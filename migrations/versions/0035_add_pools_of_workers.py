"""add pools of workers

Revision ID: 0035_pools_of_workers
Revises: 0034_callbacks_of_schedules
May run before the new code: yes; it only adds two columns, which PostgreSQL does without writing a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0035_pools_of_workers"
down_revision: str | None = "0034_callbacks_of_schedules"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("slots", sa.ARRAY(sa.Integer()), nullable=True))
    op.add_column("worker", sa.Column("pool", sa.Text(), server_default="default", nullable=False))


def downgrade() -> None:
    op.drop_column("worker", "pool")
    op.drop_column("worker", "slots")
