"""add what is kept for a tenant: its outputs and media by tenant

Revision ID: 0008_kept_for_a_tenant
Revises: 0007_event_days
May run before the new code: yes; the column may be empty, and what older code writes meanwhile is counted as nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0008_kept_for_a_tenant"
down_revision: str | None = "0007_event_days"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("output", sa.Column("tenant_id", sa.Text(), nullable=True))
    op.execute("UPDATE output SET tenant_id = job.tenant_id FROM job WHERE job.id = output.job_id")
    op.create_index("output_tenant", "output", ["tenant_id"], postgresql_include=["size"])
    op.create_index("media_tenant", "media", ["tenant_id"], postgresql_include=["size"])


def downgrade() -> None:
    op.drop_index("media_tenant", "media")
    op.drop_index("output_tenant", "output")
    op.drop_column("output", "tenant_id")
