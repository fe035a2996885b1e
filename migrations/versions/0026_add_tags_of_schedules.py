"""add tags of schedules

Revision ID: 0026_tags_of_schedules
Revises: 0025_declared_schedules
May run before the new code: yes; it adds a column with a constant default.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision: str = "0026_tags_of_schedules"
down_revision: str | None = "0025_declared_schedules"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("schedule", sa.Column("tags", JSONB(), server_default="{}", nullable=False))


def downgrade() -> None:
    op.drop_column("schedule", "tags")
