"""know the task of a job that has a single one

Revision ID: 0043_single_tasks
Revises: 0042_wake_known_tasks
May run before the new code: yes; it only adds a column, which PostgreSQL does without writing a row. The older code
leaves it empty: it writes each event of its jobs. A revision of its own, so that no transaction locks two hot tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0043_single_tasks"
down_revision: str | None = "0042_wake_known_tasks"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("single_task", sa.Uuid(), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "single_task")
