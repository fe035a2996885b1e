"""let media be deleted

Revision ID: 0014_deleted_media
Revises: 0013_expired_conversions
May run before the new code: yes; it adds a column that may be empty. Old code still shows what new code deleted, until
housekeeping has removed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014_deleted_media"
down_revision: str | None = "0013_expired_conversions"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("media", sa.Column("deleted_at", sa.TIMESTAMP(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("media", "deleted_at")
