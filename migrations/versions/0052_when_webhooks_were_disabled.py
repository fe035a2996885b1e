"""know when a webhook was disabled

Revision ID: 0052_webhook_disabled_at
Revises: 0051_grown_tables
May run before the new code: yes; it only adds a column, which PostgreSQL does without writing a row.

`GET /v1/unsettled` says since when a webhook waits for a person. It gave the time when the webhook was made. It still does
for a webhook that an earlier release disabled.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0052_webhook_disabled_at"
down_revision: str | None = "0051_grown_tables"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("webhook", sa.Column("disabled_at", sa.TIMESTAMP(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("webhook", "disabled_at")
