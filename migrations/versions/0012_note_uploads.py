"""note uploads

Revision ID: 0012_uploads
Revises: 0011_promoted_objects
May run before the new code: yes; it only adds a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0012_uploads"
down_revision: str | None = "0011_promoted_objects"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "upload",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("open", sa.Boolean(), nullable=False),
        sa.Column("exact", sa.Boolean(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("most", sa.BigInteger(), nullable=False),
        sa.Column("writable_until", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("look_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("forget_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("upload_pkey")),
    )
    op.create_index("upload_look", "upload", ["look_at"], unique=False)
    op.create_index("upload_open", "upload", ["tenant_id"], unique=False, postgresql_where=sa.text("open"))


def downgrade() -> None:
    op.drop_table("upload")
