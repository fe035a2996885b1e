"""let a run have a dedupe key

Revision ID: 0016_dedupe_keys
Revises: 0015_times_of_waiting
May run before the new code: yes; it adds a column that may be empty, and an index without holding up any writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from leasehold.db.upgrading.index_builds import build_index

revision: str = "0016_dedupe_keys"
down_revision: str | None = "0015_times_of_waiting"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("job", sa.Column("dedupe_key", sa.Text(), nullable=True), if_not_exists=True)
    build_index(
        "job_dedupe",
        "job",
        ["tenant_id", "pipeline", "dedupe_key"],
        unique=True,
        where="dedupe_key IS NOT NULL AND finished_at IS NULL",
    )


def downgrade() -> None:
    op.drop_index("job_dedupe", table_name="job")
    op.drop_column("job", "dedupe_key")
