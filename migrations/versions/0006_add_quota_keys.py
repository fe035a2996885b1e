"""add quota keys

Revision ID: 0006_quota_keys
Revises: 0005
May run before the new code: yes; it only adds a column that may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0006_quota_keys"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("api_key", sa.Column("quota_key", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("api_key", "quota_key")
