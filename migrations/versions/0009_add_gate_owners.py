"""add gate owners

Revision ID: 0009_gate_owners
Revises: 0008_kept_for_a_tenant
May run before the new code: yes. Jobs that the old code queues up have no owner, and take turns as one tenant's.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0009_gate_owners"
down_revision: str | None = "0008_kept_for_a_tenant"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_HELD = sa.text("admitted_at IS NULL")


def upgrade() -> None:
    op.add_column("gate_job", sa.Column("owner", sa.Text(), server_default="", nullable=False))
    op.execute("UPDATE gate_job g SET owner = j.tenant_id FROM job j WHERE j.id = g.job_id")
    op.create_index(
        "gate_job_turn", "gate_job", ["tenant_id", "key", "owner", "priority", "job_id"], postgresql_where=_HELD
    )
    op.drop_index("gate_job_held", table_name="gate_job", postgresql_where=_HELD)


def downgrade() -> None:
    op.create_index("gate_job_held", "gate_job", ["tenant_id", "key", "priority", "job_id"], postgresql_where=_HELD)
    op.drop_index("gate_job_turn", table_name="gate_job", postgresql_where=_HELD)
    op.drop_column("gate_job", "owner")
