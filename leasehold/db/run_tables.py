"""Declares the tables of the runs API: templates, runs, schedules, concurrency limits (`gate`), webhooks, progress.

tables.py declares the tables of jobs and tasks. A change here needs a migration.
"""

from __future__ import annotations

from sqlalchemy import (
    ARRAY,
    TIMESTAMP,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from leasehold.db.tables import metadata

_INSTANT = TIMESTAMP(timezone=True)
_NOW = func.clock_timestamp()

#: The progress of each running task, as the handler of its attempt last reported it.
progress = Table(
    "progress",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), primary_key=True),
    Column("job_id", Uuid, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("percent", Float, nullable=False),
    Column("summary", Text, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    CheckConstraint("percent BETWEEN 0 AND 100", name="percent_range"),
    postgresql_with={"fillfactor": "70"},
)

#: The parts of steps that fanned out: for each part, its task and the item that it handles (`value`). Also the steps
#: that a workflow has started, with their arguments (`value`).
item = Table(
    "item",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), primary_key=True),
    Column("parent_id", Uuid, nullable=False),  # the task that fanned out, or the task of the workflow
    Column("number", Integer, nullable=False),  # the place of the item among the items of `parent_id`
    Column("value", JSONB, nullable=False),
    Index("item_parent", "parent_id", "number"),
)

#: Templates (a template has the steps of a kind of run), one row for each version. `type`: the template's name.
template = Table(
    "template",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("version", SmallInteger, nullable=False),
    Column("enabled", Boolean, nullable=False, server_default="true"),  # the only column that ever changes
    Column("declaration", JSONB, nullable=False),
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    PrimaryKeyConstraint("tenant_id", "type", "version"),
)

#: For each template (`type`): the newest version that was deleted. A new version must have a higher number.
template_deletion = Table(
    "template_deletion",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("version", SmallInteger, nullable=False),
    PrimaryKeyConstraint("tenant_id", "type"),
)

#: Runs: jobs that a template describes. `scope`, `scope_id`: the group of runs that a concurrency policy counts
#: together.
run = Table(
    "run",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("template", Text, nullable=False),
    Column("version", SmallInteger, nullable=False),
    Column("scope", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column("scheduled_at", _INSTANT),  # no step of the run starts earlier; NULL: there is no such time
    Column("schedule_id", Uuid),  # the schedule that made this run; NULL: no schedule made it
    Column("tick", _INSTANT),  # the instant of the schedule for which this run was made
    Column("rerun_of", Uuid),  # the run that this run repeats
    Index("run_newest", "tenant_id", text("job_id DESC")),
    Index("run_of_template", "tenant_id", "template", text("job_id DESC")),
    Index("run_of_scope", "tenant_id", "scope", "scope_id", text("job_id DESC")),
    # A tick makes only one run, even with many schedulers and after any crash.
    Index("run_of_tick", "schedule_id", "tick", unique=True, postgresql_where=text("tick IS NOT NULL")),
    # For the search of jobs by a text, which may be a `scope_id`.
    Index("run_with_scope", "tenant_id", text("job_id DESC"), postgresql_where=text("scope_id <> ''")),
    Index("run_of_schedule", "schedule_id", text("job_id DESC"), postgresql_where=text("schedule_id IS NOT NULL")),
)

#: Schedules, which make runs by the clock.
schedule = Table(
    "schedule",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("template", Text, nullable=False),
    Column("version", SmallInteger),  # NULL: the newest enabled version when the schedule fires
    Column("cron", Text, nullable=False),
    Column("timezone", Text, nullable=False),
    Column("payload_template", JSONB, nullable=False),
    # Each run of the schedule gets these tags, and this URL.
    Column("tags", JSONB, nullable=False, server_default="{}"),
    Column("callback_url", Text),
    Column("scope", Text, nullable=False),
    Column("scope_id", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("overlap", Text, nullable=False),  # what a tick does while an earlier run of the schedule is unfinished
    Column("catch_up", Text, nullable=False),  # which missed ticks still start a run
    Column("catch_up_seconds", Integer, nullable=False),  # a missed tick older than this starts no run
    # The platform pauses the schedule after this many failed runs in a row; NULL: never.
    Column("pause_after_failures", Integer),
    Column("enabled", Boolean, nullable=False, server_default="true"),
    Column("paused_because", Text),  # why the platform paused the schedule; NULL: it did not
    Column("buffered_at", _INSTANT),  # overlap `buffer_one`: the tick that waits for the previous run to end
    Column("next_run_at", _INSTANT),  # NULL while disabled
    Column("last_run_at", _INSTANT),
    Column("last_error", JSONB),  # why the last firing created no run; NULL: the last firing created a run
    # How many firings in a row have created no run because of a permanent error.
    Column("failures", Integer, nullable=False, server_default="0"),
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("updated_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("declared_by", Text),  # the app whose code declares the schedule; NULL: a client wrote the schedule
    CheckConstraint("overlap IN ('skip', 'buffer_one', 'cancel_other', 'allow_all')", name="overlap_known"),
    CheckConstraint("catch_up IN ('skip', 'one', 'all')", name="catch_up_known"),
    Index("schedule_due", "next_run_at", postgresql_where=text("next_run_at IS NOT NULL")),
    Index("schedule_buffered", "id", postgresql_where=text("buffered_at IS NOT NULL")),
    Index("schedule_newest", "tenant_id", text("id DESC")),
    Index(
        "schedule_declared",
        "tenant_id",
        "declared_by",
        "template",
        unique=True,
        postgresql_where=text("declared_by IS NOT NULL"),
    ),
)

#: Concurrency limits. A job may wait at several of them.
gate = Table(
    "gate",
    metadata,
    Column("tenant_id", Text, nullable=False),  # `*`: all tenants share the limit
    Column("key", Text, nullable=False),  # what the limit counts, for example `queue:media`
    Column("at_most", Integer),  # at most this many jobs may be admitted and unfinished; NULL: any number
    Column("per_minute", Integer),  # at most this many jobs are admitted within any sixty seconds; NULL: any number
    # True: an operator declared the limit, so the row stays even while no job uses the limit.
    Column("declared", Boolean, nullable=False, server_default="false"),
    PrimaryKeyConstraint("tenant_id", "key"),
    CheckConstraint("at_most IS NULL OR at_most >= 0", name="at_most_not_negative"),
    CheckConstraint("per_minute IS NULL OR per_minute >= 0", name="per_minute_not_negative"),
)

#: The jobs that wait at a concurrency limit (`tenant_id`, `key`), or that the limit has admitted.
gate_job = Table(
    "gate_job",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("ready_at", _INSTANT, nullable=False, server_default=_NOW),  # the job is not admitted earlier
    Column("admitted_at", _INSTANT),  # NULL while the job waits
    PrimaryKeyConstraint("tenant_id", "key", "job_id"),
    # The job's tenant. (`tenant_id` is the tenant of the limit.) Tenants take turns at a limit that they share.
    Column("owner", Text, nullable=False, server_default=""),
    # Only the previous release uses this index, because that release admits the jobs of a tenant by their age.
    Index(
        "gate_job_turn",
        "tenant_id",
        "key",
        "owner",
        "priority",
        "job_id",
        postgresql_where=text("admitted_at IS NULL"),
    ),
    Index(
        "gate_job_line",
        "tenant_id",
        "key",
        "owner",
        "priority",
        "ready_at",
        "job_id",
        postgresql_where=text("admitted_at IS NULL"),
    ),
    Index("gate_job_inside", "tenant_id", "key", postgresql_where=text("admitted_at IS NOT NULL")),
    Index("gate_job_job_id", "job_id"),
)

#: The queues from which no worker claims tasks, because an operator paused them.
paused_queue = Table(
    "paused_queue",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
)

#: The URLs to which the platform sends a tenant's events. `events`: the kinds of events to send.
webhook = Table(
    "webhook",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("secrets", ARRAY(LargeBinary), nullable=False),  # encrypted, the newest first; two during a rotation
    Column("events", ARRAY(Text), nullable=False),
    Column("enabled", Boolean, nullable=False, server_default="true"),
    Column("disabled_because", Text),  # why the platform disabled the webhook; NULL: it did not
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("disabled_at", _INSTANT),  # when the webhook was last disabled; kept when it is enabled again
    Index("webhook_tenant", "tenant_id"),
)

#: The secrets that sign a tenant's callbacks. The first callback or the first rotation writes the row.
callback_secret = Table(
    "callback_secret",
    metadata,
    Column("tenant_id", Text, primary_key=True),
    Column("secrets", ARRAY(LargeBinary), nullable=False),  # encrypted, the newest first; two during a rotation
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),  # when the newest secret was made
)

#: Rate limits: how much of its rate each key or tenant has used lately (limits/rates.py).
rate_bucket = Table(
    "rate_bucket",
    metadata,
    Column("key", Text, primary_key=True),
    # When the bucket is full again, so that all requests of a minute may come at once (in GCRA: the theoretical arrival
    # time). If this instant is in the past, the bucket is full now.
    Column("full_at", _INSTANT, nullable=False),
    Index("rate_bucket_full_at", "full_at"),
)
