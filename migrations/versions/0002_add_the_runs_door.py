"""runs

Revision ID: 0002
Revises: 0001
May run before the new code: yes; what it adds has defaults, and old code ignores it.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gate",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("at_most", sa.Integer(), nullable=True),
        sa.Column("per_minute", sa.Integer(), nullable=True),
        sa.Column("declared", sa.Boolean(), server_default="false", nullable=False),
        sa.CheckConstraint("at_most IS NULL OR at_most >= 0", name=op.f("gate_at_most_not_negative")),
        sa.CheckConstraint("per_minute IS NULL OR per_minute >= 0", name=op.f("gate_per_minute_not_negative")),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("gate_pkey")),
    )
    op.create_table(
        "paused_queue",
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("queue", name=op.f("paused_queue_pkey")),
    )
    op.create_table(
        "rate_bucket",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("full_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("rate_bucket_pkey")),
    )
    op.create_index("rate_bucket_full_at", "rate_bucket", ["full_at"], unique=False)
    op.create_table(
        "schedule",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("version", sa.SmallInteger(), nullable=True),
        sa.Column("cron", sa.Text(), nullable=False),
        sa.Column("timezone", sa.Text(), nullable=False),
        sa.Column("payload_template", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("scope_id", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("overlap", sa.Text(), nullable=False),
        sa.Column("catch_up", sa.Text(), nullable=False),
        sa.Column("catch_up_seconds", sa.Integer(), nullable=False),
        sa.Column("pause_after_failures", sa.Integer(), nullable=True),
        sa.Column("enabled", sa.Boolean(), server_default="true", nullable=False),
        sa.Column("paused_because", sa.Text(), nullable=True),
        sa.Column("buffered_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("next_run_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("last_run_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("last_error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column(
            "updated_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("catch_up IN ('skip', 'one', 'all')", name=op.f("schedule_catch_up_known")),
        sa.CheckConstraint(
            "overlap IN ('skip', 'buffer_one', 'cancel_other', 'allow_all')", name=op.f("schedule_overlap_known")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("schedule_pkey")),
    )
    op.create_index(
        "schedule_buffered", "schedule", ["id"], unique=False, postgresql_where=sa.text("buffered_at IS NOT NULL")
    )
    op.create_index(
        "schedule_due", "schedule", ["next_run_at"], unique=False, postgresql_where=sa.text("next_run_at IS NOT NULL")
    )
    op.create_index("schedule_newest", "schedule", ["tenant_id", sa.literal_column("id DESC")], unique=False)
    op.create_table(
        "template",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("version", sa.SmallInteger(), nullable=False),
        sa.Column("enabled", sa.Boolean(), server_default="true", nullable=False),
        sa.Column("declaration", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("tenant_id", "type", "version", name=op.f("template_pkey")),
    )
    op.create_table(
        "webhook",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secrets", sa.ARRAY(sa.LargeBinary()), nullable=False),
        sa.Column("events", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("enabled", sa.Boolean(), server_default="true", nullable=False),
        sa.Column("disabled_because", sa.Text(), nullable=True),
        sa.Column(
            "created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("webhook_pkey")),
    )
    op.create_index("webhook_tenant", "webhook", ["tenant_id"], unique=False)
    op.create_table(
        "gate_job",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("ready_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("admitted_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("gate_job_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("tenant_id", "key", "job_id", name=op.f("gate_job_pkey")),
    )
    op.create_index(
        "gate_job_held",
        "gate_job",
        ["tenant_id", "key", "priority", "job_id"],
        unique=False,
        postgresql_where=sa.text("admitted_at IS NULL"),
    )
    op.create_index(
        "gate_job_inside",
        "gate_job",
        ["tenant_id", "key"],
        unique=False,
        postgresql_where=sa.text("admitted_at IS NOT NULL"),
    )
    op.create_index("gate_job_job_id", "gate_job", ["job_id"], unique=False)
    op.create_table(
        "run",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("version", sa.SmallInteger(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("scope_id", sa.Text(), nullable=False),
        sa.Column("scheduled_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("schedule_id", sa.Uuid(), nullable=True),
        sa.Column("tick", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("rerun_of", sa.Uuid(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("run_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("run_pkey")),
    )
    op.create_index("run_newest", "run", ["tenant_id", sa.literal_column("job_id DESC")], unique=False)
    op.create_index(
        "run_of_schedule",
        "run",
        ["schedule_id", sa.literal_column("job_id DESC")],
        unique=False,
        postgresql_where=sa.text("schedule_id IS NOT NULL"),
    )
    op.create_index(
        "run_of_scope", "run", ["tenant_id", "scope", "scope_id", sa.literal_column("job_id DESC")], unique=False
    )
    op.create_index("run_of_template", "run", ["tenant_id", "template", sa.literal_column("job_id DESC")], unique=False)
    op.create_index(
        "run_of_tick", "run", ["schedule_id", "tick"], unique=True, postgresql_where=sa.text("tick IS NOT NULL")
    )
    op.create_table(
        "item",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("parent_id", sa.Uuid(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("value", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("item_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("item_pkey")),
    )
    op.create_index("item_parent", "item", ["parent_id", "number"], unique=False)
    op.create_table(
        "progress",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("percent", sa.Float(), nullable=False),
        sa.Column("summary", sa.Text(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("percent BETWEEN 0 AND 100", name=op.f("progress_percent_range")),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("progress_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("progress_pkey")),
        postgresql_with={"fillfactor": "70"},
    )
    op.add_column("job", sa.Column("leased", sa.SmallInteger(), server_default="0", nullable=False))
    op.add_column("job", sa.Column("external", sa.SmallInteger(), server_default="0", nullable=False))
    op.add_column("job", sa.Column("held", sa.Boolean(), server_default="false", nullable=False))
    op.add_column("job", sa.Column("gated", sa.Boolean(), server_default="false", nullable=False))
    op.add_column("job", sa.Column("notify", sa.Boolean(), server_default="false", nullable=False))
    op.add_column("job", sa.Column("exclusive_key", sa.Text(), nullable=True))
    op.add_column("job", sa.Column("cancelable", sa.Boolean(), server_default="true", nullable=False))
    op.add_column("job", sa.Column("grace_seconds", sa.Integer(), server_default="30", nullable=False))
    op.add_column("job", sa.Column("cancel", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.add_column("job", sa.Column("cancel_by", sa.TIMESTAMP(timezone=True), nullable=True))
    op.create_index(
        "job_cancelled",
        "job",
        ["tenant_id", sa.literal_column("id DESC")],
        unique=False,
        postgresql_where=sa.text("cancel IS NOT NULL"),
    )
    op.create_index(
        "job_cancelling",
        "job",
        ["cancel_by"],
        unique=False,
        postgresql_where=sa.text("cancel_by IS NOT NULL AND finished_at IS NULL"),
    )
    op.create_index(
        "job_exclusive",
        "job",
        ["tenant_id", "pipeline", "exclusive_key"],
        unique=True,
        postgresql_where=sa.text("exclusive_key IS NOT NULL AND finished_at IS NULL"),
    )
    op.create_index(
        "job_failed",
        "job",
        ["tenant_id", sa.literal_column("id DESC")],
        unique=False,
        postgresql_where=sa.text("error IS NOT NULL"),
    )
    op.create_index(
        "job_live",
        "job",
        ["tenant_id", sa.literal_column("id DESC")],
        unique=False,
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index(
        "job_to_tell",
        "job",
        ["finished_at"],
        unique=False,
        postgresql_where=sa.text("notify AND finished_at IS NOT NULL"),
    )
    op.add_column("task", sa.Column("handler", sa.Text(), nullable=True))
    op.add_column("task", sa.Column("timeout_seconds", sa.Integer(), nullable=True))
    op.add_column("task", sa.Column("cancelable", sa.Boolean(), server_default="true", nullable=False))
    op.drop_index(
        op.f("task_runnable"),
        table_name="task",
        postgresql_where="(status = ANY (ARRAY['pending'::text, 'retry'::text, 'waiting'::text]))",
    )
    op.create_index(
        "task_runnable",
        "task",
        ["queue", "priority", "tenant_id", "available_at"],
        unique=False,
        postgresql_where=sa.text("status IN ('pending', 'retry', 'waiting')"),
    )


def downgrade() -> None:
    op.drop_index(
        "task_runnable", table_name="task", postgresql_where=sa.text("status IN ('pending', 'retry', 'waiting')")
    )
    op.create_index(
        op.f("task_runnable"),
        "task",
        ["queue", "priority", "available_at"],
        unique=False,
        postgresql_where="(status = ANY (ARRAY['pending'::text, 'retry'::text, 'waiting'::text]))",
    )
    op.drop_column("task", "cancelable")
    op.drop_column("task", "timeout_seconds")
    op.drop_column("task", "handler")
    op.drop_index("job_to_tell", table_name="job", postgresql_where=sa.text("notify AND finished_at IS NOT NULL"))
    op.drop_index("job_live", table_name="job", postgresql_where=sa.text("finished_at IS NULL"))
    op.drop_index("job_failed", table_name="job", postgresql_where=sa.text("error IS NOT NULL"))
    op.drop_index(
        "job_exclusive", table_name="job", postgresql_where=sa.text("exclusive_key IS NOT NULL AND finished_at IS NULL")
    )
    op.drop_index(
        "job_cancelling", table_name="job", postgresql_where=sa.text("cancel_by IS NOT NULL AND finished_at IS NULL")
    )
    op.drop_index("job_cancelled", table_name="job", postgresql_where=sa.text("cancel IS NOT NULL"))
    op.drop_column("job", "cancel_by")
    op.drop_column("job", "cancel")
    op.drop_column("job", "grace_seconds")
    op.drop_column("job", "cancelable")
    op.drop_column("job", "exclusive_key")
    op.drop_column("job", "notify")
    op.drop_column("job", "gated")
    op.drop_column("job", "held")
    op.drop_column("job", "external")
    op.drop_column("job", "leased")
    op.drop_table("progress")
    op.drop_index("item_parent", table_name="item")
    op.drop_table("item")
    op.drop_index("run_of_tick", table_name="run", postgresql_where=sa.text("tick IS NOT NULL"))
    op.drop_index("run_of_template", table_name="run")
    op.drop_index("run_of_scope", table_name="run")
    op.drop_index("run_of_schedule", table_name="run", postgresql_where=sa.text("schedule_id IS NOT NULL"))
    op.drop_index("run_newest", table_name="run")
    op.drop_table("run")
    op.drop_index("gate_job_job_id", table_name="gate_job")
    op.drop_index("gate_job_inside", table_name="gate_job", postgresql_where=sa.text("admitted_at IS NOT NULL"))
    op.drop_index("gate_job_held", table_name="gate_job", postgresql_where=sa.text("admitted_at IS NULL"))
    op.drop_table("gate_job")
    op.drop_index("webhook_tenant", table_name="webhook")
    op.drop_table("webhook")
    op.drop_table("template")
    op.drop_index("schedule_newest", table_name="schedule")
    op.drop_index("schedule_due", table_name="schedule", postgresql_where=sa.text("next_run_at IS NOT NULL"))
    op.drop_index("schedule_buffered", table_name="schedule", postgresql_where=sa.text("buffered_at IS NOT NULL"))
    op.drop_table("schedule")
    op.drop_index("rate_bucket_full_at", table_name="rate_bucket")
    op.drop_table("rate_bucket")
    op.drop_table("paused_queue")
    op.drop_table("gate")
