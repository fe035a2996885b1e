"""add tags and tombstones

Revision ID: 0019_tags_and_tombstones
Revises: 0018_uploads_of_attempts
May run before the new code: yes; it adds tables, and indexes without holding up any writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

from leasehold.db.upgrading.index_builds import build_index

revision: str = "0019_tags_and_tombstones"
down_revision: str | None = "0018_uploads_of_attempts"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_INDEXES: dict[str, list[str | sa.TextClause]] = {
    "job_failed_of": ["tenant_id", "pipeline", sa.text("id DESC")],
    "job_code": ["tenant_id", sa.text("(error ->> 'code')"), sa.text("id DESC")],
}


def upgrade() -> None:
    op.create_table(
        "job_tag",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "name", name="job_tag_pkey"),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name="job_tag_job_id_fkey", ondelete="CASCADE"),
        if_not_exists=True,
    )
    op.create_index(
        "job_tag_value", "job_tag", ["tenant_id", "name", "value", sa.text("job_id DESC")], if_not_exists=True
    )
    op.create_table(
        "tombstone",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("is_run", sa.Boolean(), nullable=False),
        sa.Column("because", sa.Text(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("because IN ('deleted', 'expired')", name=op.f("tombstone_because_known")),
        sa.PrimaryKeyConstraint("job_id", name="tombstone_pkey"),
        if_not_exists=True,
    )
    op.create_index("tombstone_at", "tombstone", ["at"], if_not_exists=True)
    for name, columns in _INDEXES.items():
        build_index(name, "job", columns, where="error IS NOT NULL")


def downgrade() -> None:
    for name in _INDEXES:
        op.drop_index(name, table_name="job")
    op.drop_table("tombstone")
    op.drop_table("job_tag")
