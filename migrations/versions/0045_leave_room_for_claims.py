"""leave room for claims in the pages of tasks

Revision ID: 0045_room_for_claims
Revises: 0044_derived_events
May run before the new code: yes; PostgreSQL only leaves more room in the pages that it fills from now on.
"""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op

revision: str = "0045_room_for_claims"
down_revision: str | None = "0044_derived_events"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("ALTER TABLE task SET (fillfactor = 50)")


def downgrade() -> None:
    op.execute("ALTER TABLE task SET (fillfactor = 70)")
