"""add totals"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "p0002"
down_revision = "p0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "print_total",
        sa.Column("tenant_id", sa.Text, primary_key=True),
        sa.Column("copies", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("print_total")
