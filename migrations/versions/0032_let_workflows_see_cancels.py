"""let workflows see cancels

Revision ID: 0032_cancels_of_workflows
Revises: 0031_people
May run before the new code: yes; it adds a column with a default, and allows one more state of a call. A workflow that
already waits sees a cancel from its next wait on.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from leasehold.db.upgrading.index_builds import end_transaction

revision: str = "0032_cancels_of_workflows"
down_revision: str | None = "0031_people"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_STATES = "'open', 'done', 'failed', 'timed_out'"


def _allow(states: str) -> None:
    """A check that is validated in a later transaction does not hold the journal while PostgreSQL reads all of its rows."""
    op.execute(
        "ALTER TABLE journal DROP CONSTRAINT journal_state_known,"
        f" ADD CONSTRAINT journal_state_known CHECK (state IN ({states})) NOT VALID"
    )
    end_transaction()
    op.execute("ALTER TABLE journal VALIDATE CONSTRAINT journal_state_known")


def upgrade() -> None:
    op.add_column(
        "task", sa.Column("journaled", sa.Boolean(), server_default="false", nullable=False), if_not_exists=True
    )
    end_transaction()
    _allow(f"{_STATES}, 'cancelled'")


def downgrade() -> None:
    op.execute("UPDATE journal SET state = 'failed' WHERE state = 'cancelled'")
    _allow(_STATES)
    op.drop_column("task", "journaled")
