"""create printing"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "p0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "print_order",
        sa.Column("job_id", sa.Uuid, sa.ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("title", sa.Text, nullable=False),
        sa.Column("copies", sa.Integer, nullable=False),
    )
    op.create_table(
        "print_proof",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("tenant_id", sa.Text, nullable=False),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False, index=True),
    )


def downgrade() -> None:
    op.drop_table("print_proof")
    op.drop_table("print_order")
