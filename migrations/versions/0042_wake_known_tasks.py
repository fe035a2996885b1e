"""remember the tasks whose code no worker has, so that a worker that has it finds them

Revision ID: 0042_wake_known_tasks
Revises: 0041_know_handlers
May run before the new code: yes; it only adds a table. A worker of an older release does not write it: it puts such a
task off for two minutes at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0042_wake_known_tasks"
down_revision: str | None = "0041_know_handlers"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "unknown_task",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("handler", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name="unknown_task_task_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name="unknown_task_pkey"),
    )
    op.create_index("unknown_task_handler", "unknown_task", ["handler", "queue"])


def downgrade() -> None:
    op.drop_table("unknown_task")
