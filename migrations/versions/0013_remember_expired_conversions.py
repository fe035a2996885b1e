"""remember expired conversions

Revision ID: 0013_expired_conversions
Revises: 0012_uploads
May run before the new code: yes; it adds a table, and a column that may be empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0013_expired_conversions"
down_revision: str | None = "0012_uploads"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("conversion", sa.Column("client_id", sa.Text(), nullable=True))
    op.create_table(
        "expired_conversion",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column(
            "forgotten_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("job_id", name=op.f("expired_conversion_pkey")),
    )
    op.create_index("expired_conversion_forgotten", "expired_conversion", ["forgotten_at"], unique=False)


def downgrade() -> None:
    op.drop_table("expired_conversion")
    op.drop_column("conversion", "client_id")
