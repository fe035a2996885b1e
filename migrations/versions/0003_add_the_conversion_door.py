"""conversion

Revision ID: 0003
Revises: 0002
May run before the new code: yes; it only adds tables.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "conversion",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("owner_tenant", sa.Text(), nullable=True),
        sa.Column("source_filename", sa.Text(), nullable=False),
        sa.Column("input", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("promoting_until", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("promoted", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("conversion_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("conversion_pkey")),
    )
    op.create_index("conversion_newest", "conversion", ["tenant_id", sa.literal_column("job_id DESC")], unique=False)
    op.create_index(
        "conversion_of_user", "conversion", ["tenant_id", "user_id", sa.literal_column("job_id DESC")], unique=False
    )
    op.create_table(
        "download",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key_prefix", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column(
            "started_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("lapses_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("finished_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("download_pkey")),
    )
    op.create_index("download_of_key", "download", ["key_prefix", "started_at"], unique=False)
    op.create_index("download_started", "download", ["started_at"], unique=False)


def downgrade() -> None:
    op.drop_table("download")
    op.drop_table("conversion")
