"""note uploads of attempts

Revision ID: 0018_uploads_of_attempts
Revises: 0017_kept_events
May run before the new code: yes; it only adds columns that may be empty, and an index of none of the present rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0018_uploads_of_attempts"
down_revision: str | None = "0017_kept_events"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("upload", sa.Column("task_id", sa.Uuid(), nullable=True))
    op.add_column("upload", sa.Column("epoch", sa.Integer(), nullable=True))
    op.create_index(
        "upload_attempt", "upload", ["task_id", "epoch"], postgresql_where=sa.text("task_id IS NOT NULL AND open")
    )


def downgrade() -> None:
    op.drop_index("upload_attempt", table_name="upload")
    op.drop_column("upload", "epoch")
    op.drop_column("upload", "task_id")
