"""create the core

Revision ID: 0001
Revises: nothing
May run before the new code: yes; there is no code without it.

Since release 0.1.0 only the order of the columns of `job` and `task` has changed here. Databases that were made before
keep their order: it changes what PostgreSQL's log gets, and nothing else (leasehold/db/tables.py).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# The media text names these columns (its section 7.2); SREs read them.
PROCESSING_TASK = """
CREATE VIEW processing_task AS
SELECT t.id, m.id AS media_id, t.job_id, t.step,
       CASE t.status WHEN 'blocked' THEN 'PENDING' WHEN 'waiting' THEN 'RETRY' ELSE upper(t.status) END AS status,
       greatest(t.attempt - 1, 0) AS retry_count,
       t.lease_owner AS lock_by, t.lease_until AS lock_until,
       CASE WHEN t.position = 0 THEN m.original_key
            ELSE (SELECT min(o.key) FROM output o WHERE o.job_id = t.job_id AND o.step = 'resize') END AS input_key,
       (SELECT min(o.key) FROM output o WHERE o.task_id = t.id) AS output_key,
       (SELECT f.code || ': ' || f.message FROM failure f WHERE f.task_id = t.id ORDER BY f.epoch DESC LIMIT 1)
           AS last_error,
       j.created_at, greatest(t.started_at, t.finished_at, j.created_at) AS updated_at
FROM task t JOIN job j ON j.id = t.job_id LEFT JOIN media m ON m.job_id = t.job_id
"""


def upgrade() -> None:
    op.create_table(
        "api_key",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("api_key_pkey")),
        sa.UniqueConstraint("prefix", name=op.f("api_key_prefix_key")),
    )
    op.create_table(
        "event",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("job_status", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=True),
        sa.Column("step", sa.Text(), nullable=True),
        sa.Column("task_status", sa.Text(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.PrimaryKeyConstraint("job_id", "seq", "at", name=op.f("event_pkey")),
        postgresql_partition_by="RANGE (at)",
    )
    op.create_table(
        "idempotency",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.LargeBinary(), nullable=False),
        sa.Column("status_code", sa.SmallInteger(), nullable=True),
        sa.Column("body", sa.LargeBinary(), nullable=True),
        sa.Column("locked_until", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "key", name=op.f("idempotency_pkey")),
    )
    op.create_index("idempotency_expires", "idempotency", ["expires_at"], unique=False)
    op.create_table(
        "job",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("pipeline_version", sa.SmallInteger(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), server_default="1", nullable=False),
        sa.Column("keep_seconds", sa.Integer(), nullable=True),
        sa.Column("params", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("inputs", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("output_prefix", sa.Text(), nullable=False),
        sa.Column("trace", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("deadline_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("event_seq", sa.Integer(), nullable=False),
        sa.Column("steps_left", sa.SmallInteger(), nullable=False),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("started_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(status IN ('cancelled', 'expired', 'failed', 'succeeded')) = (finished_at IS NOT NULL)",
            name=op.f("job_finished_iff_terminal"),
        ),
        sa.CheckConstraint(
            "status IN ('pending', 'queued', 'running', 'waiting_worker', 'cancel_requested', 'succeeded', 'failed', 'cancelled', 'expired')",
            name=op.f("job_status_known"),
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 2", name=op.f("job_priority_band")),
        sa.CheckConstraint("steps_left >= 0", name=op.f("job_steps_left_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("job_pkey")),
        postgresql_with={"fillfactor": "80"},
    )
    op.create_index(
        "job_deadline", "job", ["deadline_at"], unique=False, postgresql_where=sa.text("finished_at IS NULL")
    )
    op.create_index(
        "job_expires", "job", ["expires_at"], unique=False, postgresql_where=sa.text("expires_at IS NOT NULL")
    )
    op.create_index("job_tenant_newest", "job", ["tenant_id", "pipeline", sa.literal_column("id DESC")], unique=False)
    op.create_table(
        "leadership",
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("owner", sa.Uuid(), nullable=False),
        sa.Column("until", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("role", name=op.f("leadership_pkey")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("headers", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("relay_at", sa.TIMESTAMP(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("outbox_pkey")),
        postgresql_with={
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "1000",
            "autovacuum_vacuum_cost_delay": "0",
        },
    )
    op.create_index("outbox_relay_at", "outbox", ["relay_at"], unique=False)
    op.create_table(
        "worker",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("presence_key", sa.Integer(), sa.Identity(always=True), nullable=False),
        sa.Column("present", sa.Boolean(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("queues", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("draining", sa.Boolean(), server_default="false", nullable=False),
        sa.Column(
            "started_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "seen_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("worker_pkey")),
        sa.UniqueConstraint("presence_key", name=op.f("worker_presence_key_key")),
    )
    op.create_table(
        "media",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), server_default="INIT", nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=True),
        sa.Column("original_key", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("file_name", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=True),
        sa.Column("error", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column(
            "created_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column(
            "updated_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("(status = 'FAILED') = (error IS NOT NULL)", name=op.f("media_failed_says_why")),
        sa.CheckConstraint("status IN ('INIT', 'UPLOADED', 'FAILED')", name=op.f("media_status_known")),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.id"],
            name=op.f("media_job_id_fkey"),
            ondelete="SET NULL",
            initially="DEFERRED",
            deferrable=True,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("media_pkey")),
        sa.UniqueConstraint("job_id", name=op.f("media_job_id_key")),
        sa.UniqueConstraint("original_key", name=op.f("media_original_key_key")),
    )
    op.create_index(
        "media_expires",
        "media",
        ["expires_at"],
        unique=False,
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_table(
        "task",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("position", sa.SmallInteger(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("unblocks", sa.ARRAY(sa.Uuid()), server_default="{}", nullable=False),
        sa.Column("max_attempts", sa.SmallInteger(), nullable=False),
        sa.Column("waiting_on", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("errors", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("crashes", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column("losses", sa.SmallInteger(), server_default="0", nullable=False),
        sa.Column(
            "available_at",
            sa.TIMESTAMP(timezone=True),
            server_default=sa.text("clock_timestamp()"),
            nullable=False,
        ),
        sa.Column("attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("lease_owner", sa.Uuid(), nullable=True),
        sa.Column("lease_until", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("started_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("finished_at", sa.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("(status = 'blocked') <= (waiting_on > 0)", name=op.f("task_blocked_waits")),
        sa.CheckConstraint(
            "(status = 'running') = (lease_owner IS NOT NULL AND lease_until IS NOT NULL)",
            name=op.f("task_leased_iff_running"),
        ),
        sa.CheckConstraint(
            "(status IN ('cancelled', 'failed', 'skipped', 'succeeded')) = (finished_at IS NOT NULL)",
            name=op.f("task_finished_iff_terminal"),
        ),
        sa.CheckConstraint(
            "status IN ('blocked', 'pending', 'running', 'retry', 'waiting', 'succeeded', 'failed', 'skipped', 'cancelled')",
            name=op.f("task_status_known"),
        ),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("task_job_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("task_pkey")),
        sa.UniqueConstraint("job_id", "step", name="task_job_id_step_key"),
        postgresql_with={
            "fillfactor": "70",
            "autovacuum_vacuum_scale_factor": "0.01",
            "autovacuum_vacuum_threshold": "200",
            "autovacuum_vacuum_cost_delay": "0",
        },
    )
    op.create_index(
        "task_dead_letters",
        "task",
        ["tenant_id", "finished_at"],
        unique=False,
        postgresql_where=sa.text("status = 'failed'"),
    )
    op.create_index(
        "task_runnable",
        "task",
        ["queue", "priority", "available_at"],
        unique=False,
        postgresql_where=sa.text("status IN ('pending', 'retry', 'waiting')"),
    )
    op.create_index("task_running", "task", ["id"], unique=False, postgresql_where=sa.text("status = 'running'"))
    op.create_table(
        "failure",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("retryable", sa.Boolean(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("cause IN ('error', 'timeout', 'crash', 'loss')", name=op.f("failure_cause_known")),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("failure_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "epoch", name=op.f("failure_pkey")),
    )
    op.create_table(
        "note",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("value", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("note_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("note_pkey")),
    )
    op.create_table(
        "output",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("step", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("output_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", "name", name=op.f("output_pkey")),
    )
    op.create_index("output_job_id", "output", ["job_id"], unique=False)
    op.create_table(
        "result",
        sa.Column("task_id", sa.Uuid(), nullable=False),
        sa.Column("value", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["task_id"], ["task.id"], name=op.f("result_task_id_fkey"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("task_id", name=op.f("result_pkey")),
    )
    op.execute("CREATE TABLE event_default PARTITION OF event DEFAULT")
    op.execute(PROCESSING_TASK)


def downgrade() -> None:
    op.execute("DROP VIEW processing_task")
    op.drop_table("result")
    op.drop_index("output_job_id", table_name="output")
    op.drop_table("output")
    op.drop_table("note")
    op.drop_table("failure")
    op.drop_index("task_running", table_name="task", postgresql_where=sa.text("status = 'running'"))
    op.drop_index(
        "task_runnable",
        table_name="task",
        postgresql_where=sa.text("status IN ('pending', 'retry', 'waiting')"),
    )
    op.drop_index("task_dead_letters", table_name="task", postgresql_where=sa.text("status = 'failed'"))
    op.drop_table("task")
    op.drop_index("media_expires", table_name="media", postgresql_where=sa.text("expires_at IS NOT NULL"))
    op.drop_table("media")
    op.drop_table("worker")
    op.drop_index("outbox_relay_at", table_name="outbox")
    op.drop_table("outbox")
    op.drop_table("leadership")
    op.drop_index("job_tenant_newest", table_name="job")
    op.drop_index("job_expires", table_name="job", postgresql_where=sa.text("expires_at IS NOT NULL"))
    op.drop_index("job_deadline", table_name="job", postgresql_where=sa.text("finished_at IS NULL"))
    op.drop_table("job")
    op.drop_index("idempotency_expires", table_name="idempotency")
    op.drop_table("idempotency")
    op.drop_table("event")
    op.drop_table("api_key")
