"""remember deleted versions of templates

Revision ID: 0038_deleted_versions
Revises: 0037_less_for_a_job
May run before the new code: yes; it only adds a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0038_deleted_versions"
down_revision: str | None = "0037_less_for_a_job"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "template_deletion",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("version", sa.SmallInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "type", name="template_deletion_pkey"),
    )


def downgrade() -> None:
    op.drop_table("template_deletion")
