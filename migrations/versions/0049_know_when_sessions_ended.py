"""know when the sessions of a person ended

Revision ID: 0049_ended_sessions
Revises: 0048_lines_of_limits
May run before the new code: yes; it only adds a column, which PostgreSQL does without writing a row.

A session in one tenant can be exchanged for one in another tenant of the same person. It opened a tenant whose admin had
ended the person's sessions there.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0049_ended_sessions"
down_revision: str | None = "0048_lines_of_limits"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("person", sa.Column("sessions_ended_at", sa.TIMESTAMP(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("person", "sessions_ended_at")
