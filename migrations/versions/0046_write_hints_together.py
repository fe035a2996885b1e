"""write the hints of a statement together

Revision ID: 0046_hints_together
Revises: 0045_room_for_claims
May run before the new code: yes; it only adds a table, which the older code does not know. The older code writes each
hint into a row of `outbox`, and so does the new code where there is only one. A relay of the older code does not see the
new table: polls find the tasks of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0046_hints_together"
down_revision: str | None = "0045_room_for_claims"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "outbox_batch",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("task_ids", sa.ARRAY(sa.Uuid()), nullable=False),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("relay_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("outbox_batch_pkey")),
        postgresql_with={
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "1000",
            "autovacuum_vacuum_cost_delay": "0",
        },
    )
    op.create_index("outbox_batch_relay_at", "outbox_batch", ["relay_at"], unique=False)


def downgrade() -> None:
    op.execute("""
        INSERT INTO outbox (task_id, job_id, queue, priority, headers, created_at, relay_at)
        SELECT t.id, t.job_id, t.queue, t.priority, j.trace, b.created_at, b.relay_at
        FROM outbox_batch b CROSS JOIN unnest(b.task_ids) AS hinted(id)
        JOIN task t ON t.id = hinted.id JOIN job j ON j.id = t.job_id
    """)
    op.drop_table("outbox_batch")
