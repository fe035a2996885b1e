"""conversion

Revision ID: 0003
Revises: 0002
May run before the new code: yes; it only adds a table.
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
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("conversion_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("conversion_pkey")),
    )
    op.create_index("conversion_newest", "conversion", ["tenant_id", sa.literal_column("job_id DESC")], unique=False)
    op.create_index(
        "conversion_of_user", "conversion", ["tenant_id", "user_id", sa.literal_column("job_id DESC")], unique=False
    )


def downgrade() -> None:
    op.drop_table("conversion")
