"""move tenants to another cell

Revision ID: 0040_move_tenants
Revises: 0039_starts_of_workers
May run before the new code: yes; it only adds a table and three functions. No trigger calls them until
`leasehold cells move` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0040_move_tenants"
down_revision: str | None = "0039_starts_of_workers"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# The connections of the workers go on: they end what runs. Those of the API, of the application, and of others do not.
_REFUSE = """
CREATE FUNCTION refuse_while_moving() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF split_part(current_setting('application_name'), ' ', 1) = 'leasehold'
       AND split_part(current_setting('application_name'), ' ', 2)
           IN ('worker', 'claims', 'settlements', 'journal', 'logs', 'streams', 'cells') THEN
        RETURN CASE WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
    END IF;
    RAISE EXCEPTION 'the tenant is moving to another cell' USING ERRCODE = 'LHMOV';
END
$body$
"""

# A thousand years, in hours: the sum is exact in every time zone, so that the difference gives the same instant again.
_POSTPONE_TASK = """
CREATE FUNCTION postpone_task_while_moving() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF NEW.available_at < '2900-01-01+00' THEN
        NEW.available_at := NEW.available_at + interval '8766000 hours';
    END IF;
    RETURN NEW;
END
$body$
"""

_POSTPONE_SCHEDULE = """
CREATE FUNCTION postpone_schedule_while_moving() RETURNS trigger LANGUAGE plpgsql AS $body$
BEGIN
    IF NEW.next_run_at < '2900-01-01+00' THEN
        NEW.next_run_at := NEW.next_run_at + interval '8766000 hours';
    END IF;
    RETURN NEW;
END
$body$
"""


def upgrade() -> None:
    op.create_table(
        "tenant_move",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("from_cell", sa.Text(), nullable=False),
        sa.Column("to_cell", sa.Text(), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column(
            "started_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("tenant_id", name="tenant_move_pkey"),
        sa.CheckConstraint("direction IN ('out', 'in')", name=op.f("tenant_move_direction_known")),
        sa.CheckConstraint(
            "stage IN ('drain', 'copy', 'switch', 'moved', 'live')", name=op.f("tenant_move_stage_known")
        ),
    )
    op.execute(_REFUSE)
    op.execute(_POSTPONE_TASK)
    op.execute(_POSTPONE_SCHEDULE)


def downgrade() -> None:
    op.execute("DROP FUNCTION postpone_schedule_while_moving() CASCADE")
    op.execute("DROP FUNCTION postpone_task_while_moving() CASCADE")
    op.execute("DROP FUNCTION refuse_while_moving() CASCADE")
    op.drop_table("tenant_move")
