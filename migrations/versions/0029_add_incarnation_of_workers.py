"""add the incarnation of workers

Revision ID: 0029_incarnation_of_workers
Revises: 0028_callbacks
May run before the new code: yes; it only adds a column without a default.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0029_incarnation_of_workers"
down_revision: str | None = "0028_callbacks"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("worker", sa.Column("incarnation", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("worker", "incarnation")
