"""Declares the tables of jobs, tasks and the platform itself. The other files `*_tables.py` add their tables to the
same metadata. A job that executes a template is a run, which also has a row in the table `run` (run_tables.py).

A change here needs a migration. `task` is the table with the most updates, so it is narrow, has fillfactor 50, and is
vacuumed early. **None of its indexes contains a column that a heartbeat changes** (`lease_until`), because lease
renewals must stay heap-only updates.

In `job` and `task`, columns that no claim or completion changes come first. For an updated row, PostgreSQL writes to
the WAL only the bytes from the first changed byte to the last. So a claim or a completion does not write `params` to
the WAL again, because `params` stands before the changed columns. An older installation has another order, because no
migration moves columns.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import (
    ARRAY,
    TIMESTAMP,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnClause,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    TableClause,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from leasehold.domain.states import JOB_TERMINAL, TASK_TERMINAL, JobState, TaskState

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s",
        "ix": "%(table_name)s_%(column_0_N_name)s",
    }
)

_INSTANT = TIMESTAMP(timezone=True)
_NOW = func.clock_timestamp()


def _in(column: str, states: Iterable[JobState | TaskState]) -> str:
    return f"{column} IN ({', '.join(repr(state.value) for state in states)})"


job = Table(
    "job",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("pipeline", Text, nullable=False),
    Column("pipeline_version", SmallInteger, nullable=False),
    Column("priority", SmallInteger, nullable=False, server_default="1"),  # 0 high, 1 normal, 2 low
    Column("keep_seconds", Integer),  # how long the finished job and its objects stay; NULL: for ever
    Column("params", JSONB, nullable=False),
    Column("inputs", JSONB, nullable=False),  # {input name: object key}
    Column("output_prefix", Text, nullable=False),  # the keys of the job's outputs begin with it
    Column("trace", JSONB),  # request_id and traceparent of the request that submitted the job
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    # The time at which an unfinished job ends with the status `expired`. For a job that waits at its concurrency limits
    # (`held`), this is the latest time of its admission.
    Column("deadline_at", _INSTANT),
    Column("error", JSONB),  # {code, message, step, retryable} once failed
    # the number of the last event. It is counted up under the row's lock, so that the numbers have no gaps
    Column("event_seq", Integer, nullable=False),
    Column("steps_left", SmallInteger, nullable=False),  # counted down under the row's lock; 0: the job has succeeded
    Column("status", Text, nullable=False, server_default=JobState.PENDING.value),
    Column("started_at", _INSTANT),
    Column("finished_at", _INSTANT),
    Column("expires_at", _INSTANT),  # when retention may delete the ended job: `keep_seconds` after its end
    # How long the job may run after its admission, and how long it may wait for the admission. `deadline_at` is
    # computed from them.
    Column("timeout_seconds", Integer),
    Column("start_within_seconds", Integer),
    Column("leased", SmallInteger, nullable=False, server_default="0"),  # how many steps have a lease now
    Column("external", SmallInteger, nullable=False, server_default="0"),  # how many steps external workers do
    # The job waits at its concurrency limits (transitions/concurrency).
    Column("held", Boolean, nullable=False, server_default="false"),
    # The job has concurrency limits, so its end may let them admit other jobs.
    Column("gated", Boolean, nullable=False, server_default="false"),
    # When the job ends, the platform must notify the tenant's webhooks, or start the run that follows the job.
    Column("notify", Boolean, nullable=False, server_default="false"),
    # At most one unfinished job of a tenant and pipeline has this key. The kind of work makes the key, for example from
    # the scope of a run.
    Column("exclusive_key", Text),
    Column("dedupe_key", Text),  # as exclusive_key, but the client that submitted the run chose the key
    Column("cancelable", Boolean, nullable=False, server_default="true"),
    Column("grace_seconds", Integer, nullable=False, server_default="30"),  # from the cancel request to the forced end
    Column("cancel", JSONB),  # {reason, by, at} once a cancel was requested
    Column("cancel_by", _INSTANT),  # when the leader forces a requested cancel
    # The job's only task, if the job was submitted with a single task that was due immediately. Three events of such a
    # job are not stored: the submission, the first claim, and the completion by that claim. The view `history` computes
    # them from the rows of job and task.
    Column("single_task", Uuid),
    CheckConstraint(_in("status", JobState), name="status_known"),
    CheckConstraint(
        f"({_in('status', sorted(JOB_TERMINAL))}) = (finished_at IS NOT NULL)", name="finished_iff_terminal"
    ),
    CheckConstraint("priority BETWEEN 0 AND 2", name="priority_band"),
    CheckConstraint("steps_left >= 0", name="steps_left_not_negative"),
    # The two indexes below change only when a job is written and when it ends.
    Index("job_overdue", "deadline_at", postgresql_where=text("deadline_at IS NOT NULL AND finished_at IS NULL")),
    Index("job_expires", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("job_tenant_newest", "tenant_id", "pipeline", text("id DESC")),  # lists, newest first (UUIDv7)
    # Lists by state. The predicates name no column that changes while a job makes progress.
    Index("job_live", "tenant_id", text("id DESC"), postgresql_where=text("finished_at IS NULL")),
    # Only jobs with external steps. Most jobs have no external steps, and cost nothing here.
    Index("job_external", "tenant_id", "id", postgresql_where=text("finished_at IS NULL AND external > 0")),
    Index("job_failed", "tenant_id", text("id DESC"), postgresql_where=text("error IS NOT NULL")),
    Index("job_cancelled", "tenant_id", text("id DESC"), postgresql_where=text("cancel IS NOT NULL")),
    Index("job_failed_of", "tenant_id", "pipeline", text("id DESC"), postgresql_where=text("error IS NOT NULL")),
    Index(
        "job_code", "tenant_id", text("(error ->> 'code')"), text("id DESC"), postgresql_where=text("error IS NOT NULL")
    ),
    # A search for a text in the lists of jobs also reads each job with a dedupe key (job_lists.py).
    Index("job_with_key", "tenant_id", text("id DESC"), postgresql_where=text("dedupe_key IS NOT NULL")),
    Index("job_cancelling", "cancel_by", postgresql_where=text("cancel_by IS NOT NULL AND finished_at IS NULL")),
    Index("job_to_tell", "finished_at", postgresql_where=text("notify AND finished_at IS NOT NULL")),
    Index(
        "job_exclusive",
        "tenant_id",
        "pipeline",
        "exclusive_key",
        unique=True,
        postgresql_where=text("exclusive_key IS NOT NULL AND finished_at IS NULL"),
    ),
    Index(
        "job_dedupe",
        "tenant_id",
        "pipeline",
        "dedupe_key",
        unique=True,
        postgresql_where=text("dedupe_key IS NOT NULL AND finished_at IS NULL"),
    ),
    # Half of each page stays free. A claim updates many jobs at once, and their rows are mostly on the same page. The
    # free half has room for the new versions of their rows.
    postgresql_with={"fillfactor": "50"},
)

#: The tags that a client gave a job. With this separate table, a job without tags costs nothing, and a list by tag
#: reads one range of an index, newest first.
job_tag = Table(
    "job_tag",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("name", Text, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("value", Text, nullable=False),
    PrimaryKeyConstraint("job_id", "name"),
    Index("job_tag_value", "tenant_id", "name", "value", text("job_id DESC")),
)

#: The callback URL of a job. The platform sends each end of the job to this URL. (After a retry, a job may end again.)
#: `delivery_id`: the delivery job of the latest end.
job_callback = Table(
    "job_callback",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("delivery_id", Uuid),
)

#: Deleted and expired jobs. While a job has a row here, the API answers requests for it with 410, not 404.
tombstone = Table(
    "tombstone",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("pipeline", Text, nullable=False),
    Column("is_run", Boolean, nullable=False),
    Column("because", Text, nullable=False),  # deleted | expired
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    CheckConstraint("because IN ('deleted', 'expired')", name="because_known"),
    Index("tombstone_at", "at"),
)

#: The jobs on which a bulk operation could not act, each with the reason.
operation_refusal = Table(
    "operation_refusal",
    metadata,
    Column("operation_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("tenant_id", Text, nullable=False),  # of the operation
    Column("code", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    PrimaryKeyConstraint("operation_id", "job_id"),
)

task = Table(
    "task",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("step", Text, nullable=False),
    Column("position", SmallInteger, nullable=False),  # of the step in the job
    Column("queue", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("unblocks", ARRAY(Uuid), nullable=False, server_default="{}"),  # tasks that need this task
    Column("max_attempts", SmallInteger, nullable=False),
    # For how many unfinished steps or parts the task waits. The concurrency limits of a held job count as one step.
    Column("waiting_on", SmallInteger, nullable=False, server_default="0"),
    Column("errors", SmallInteger, nullable=False, server_default="0"),  # attempts that failed or timed out
    Column("crashes", SmallInteger, nullable=False, server_default="0"),  # attempts whose child process died
    Column("losses", SmallInteger, nullable=False, server_default="0"),  # attempts lost with their worker
    Column("available_at", _INSTANT, nullable=False, server_default=_NOW),
    # The number of the attempt. It counts the claims, except claims that ended in a release, snooze, suspend or
    # fan-out.
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("epoch", Integer, nullable=False, server_default="0"),  # the number of all claims (the fencing token)
    Column("status", Text, nullable=False),
    Column("lease_owner", Uuid),  # the worker that has claimed the task
    Column("lease_until", _INSTANT),
    Column("started_at", _INSTANT),
    Column("finished_at", _INSTANT),
    Column("handler", Text),  # `pipeline.step` of the code that does the step; NULL: code of the job's own pipeline
    Column("timeout_seconds", Integer),  # a template's time limit of one attempt; NULL: the limit in the code holds
    Column("cancelable", Boolean, nullable=False, server_default="true"),  # a cancel may interrupt the step
    # Only for the task of a workflow. `news` counts the finished steps of the workflow and the signals to it. `wake_at`
    # is a count, and not a time. The workflow's wait ends when `news` reaches this count. NULL: no count ends the wait.
    Column("news", Integer, nullable=False, server_default="0"),
    Column("wake_at", Integer),
    # A workflow started the step. If the step fails for good, the job goes on, because the workflow decides what
    # follows.
    Column("contained", Boolean, nullable=False, server_default="false"),
    # The workflow's code has made a call (of a step, for example), which is in the journal. Once there is such a call,
    # a cancel of the job does not end the task immediately, because the code must first get the cancel, so that it can
    # undo its work.
    Column("journaled", Boolean, nullable=False, server_default="false"),
    # Set only for a task that is the `single_task` of its job. The view `history` computes two of the task's events
    # from these columns.
    Column("claim_seq", Integer),  # the number (`seq`) of the event of its first claim
    Column("done_seq", Integer),  # the number of the event of its completion by that claim
    Column("claimed_by", Uuid),  # the worker of that claim, once `lease_owner` no longer names it
    # A job has one row for each step, however often a submission or a retry is repeated.
    UniqueConstraint("job_id", "step", name="task_job_id_step_key"),
    CheckConstraint(_in("status", TaskState), name="status_known"),
    CheckConstraint(
        "(status = 'running') = (lease_owner IS NOT NULL AND lease_until IS NOT NULL)",
        name="leased_iff_running",
    ),
    CheckConstraint(
        f"({_in('status', sorted(TASK_TERMINAL))}) = (finished_at IS NOT NULL)", name="finished_iff_terminal"
    ),
    # false <= true, so `<=` means "implies".
    CheckConstraint("(status = 'blocked') <= (waiting_on > 0)", name="blocked_waits"),
    # For polls, which read the due tasks of a queue, priority and tenant, the oldest first.
    Index(
        "task_runnable",
        "queue",
        "priority",
        "tenant_id",
        "available_at",
        postgresql_where=text("status IN ('pending', 'retry', 'waiting')"),
    ),
    # For the sweeper, which looks for expired leases among the running tasks. The index has no lease_until (see the
    # head).
    Index("task_running", "id", postgresql_where=text("status = 'running'")),
    Index("task_dead_letters", "tenant_id", "finished_at", postgresql_where=text("status = 'failed'")),
    # Half of each page stays free, as in `job`. A claim's new version of a row then mostly fits into the same page, and
    # PostgreSQL writes to the WAL only what changed.
    postgresql_with={
        "fillfactor": "50",
        "autovacuum_vacuum_scale_factor": "0.01",
        "autovacuum_vacuum_threshold": "200",
        "autovacuum_vacuum_cost_delay": "0",
    },
)

#: The outputs that steps have committed.
output = Table(
    "output",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), nullable=False),
    Column("name", Text, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("step", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("content_type", Text, nullable=False),
    Column("tenant_id", Text),  # NULL: written before migration 0008; no tenant's quota counts it
    PrimaryKeyConstraint("task_id", "name"),
    Index("output_job_id", "job_id"),
    Index("output_tenant", "tenant_id", postgresql_include=["size"]),  # the bytes stored for a tenant
)

#: The value that a step returned when it succeeded.
result = Table(
    "result",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), primary_key=True),
    Column("value", JSONB, nullable=False),
)

#: What an attempt wrote down for the next attempt of its step.
note = Table(
    "note",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), primary_key=True),
    Column("value", JSONB, nullable=False),
)

#: Tasks that a worker put off because it lacked their code. The row is void after the task's next claim, because the
#: claim raises the task's epoch.
unknown_task = Table(
    "unknown_task",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), primary_key=True),
    Column("epoch", Integer, nullable=False),  # the task's epoch when a worker without its code put it off
    Column("queue", Text, nullable=False),
    # The name `pipeline.step` of the task's code. `a.b, c.d`: the task needs the code of both (domain/missing_code.py).
    Column("handler", Text, nullable=False),
    Index("unknown_task_handler", "handler", "queue"),
)

#: The attempts that failed, one row for each lease.
failure = Table(
    "failure",
    metadata,
    Column("task_id", Uuid, ForeignKey("task.id", ondelete="CASCADE"), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("cause", Text, nullable=False),  # error | timeout | crash | loss
    Column("code", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("retryable", Boolean, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    PrimaryKeyConstraint("task_id", "epoch"),
    CheckConstraint("cause IN ('error', 'timeout', 'crash', 'loss')", name="cause_known"),
)

# The history of jobs. Rows are only added, and the table has a partition for each day. An old partition is dropped,
# after the events of jobs that still exist have moved to `kept_event` (history.py). Readers use the view `history`,
# which has the rows of `event` and `kept_event`, and the events of jobs with a single task (see `single_task` of
# `job`). `job_status` and `task_status` are the states of the job and of the task after the event. So after a job has
# ended, its last event has the status of its row in `job`. The last event of each task has the status of the task's row
# in `task`.
event = Table(
    "event",
    metadata,
    Column("job_id", Uuid, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    Column("tenant_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("job_status", Text, nullable=False),
    Column("task_id", Uuid),
    Column("step", Text),
    Column("task_status", Text),
    Column("epoch", Integer),
    Column("data", JSONB),
    PrimaryKeyConstraint("job_id", "seq", "at"),
    postgresql_partition_by="RANGE (at)",
)

# The events of existing jobs whose partition of `event` was dropped. The columns are those of `event`.
kept_event = Table(
    "kept_event",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("seq", Integer, nullable=False),
    Column("at", _INSTANT, nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("job_status", Text, nullable=False),
    Column("task_id", Uuid),
    Column("step", Text),
    Column("task_status", Text),
    Column("epoch", Integer),
    Column("data", JSONB),
    PrimaryKeyConstraint("job_id", "seq"),
)
#: A view. It has the rows of `event` and `kept_event`, and events that it derives from the rows of jobs and tasks
#: (migration 0044).
history = TableClause("history", *(ColumnClause(column.name, column.type) for column in event.columns))

#: Hints (messages about tasks that may be due) that the broker has not confirmed yet (broker/outbox.py).
outbox = Table(
    "outbox",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("task_id", Uuid, nullable=False),
    Column("job_id", Uuid, nullable=False),
    Column("queue", Text, nullable=False),
    Column("priority", SmallInteger, nullable=False),
    Column("headers", JSONB),
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    # Until this instant, the process that committed the row may publish the hint. Later, the relay (a worker's loop)
    # publishes it.
    Column("relay_at", _INSTANT, nullable=False),
    Index("outbox_relay_at", "relay_at"),
    postgresql_with={
        "autovacuum_vacuum_scale_factor": "0",
        "autovacuum_vacuum_threshold": "1000",
        "autovacuum_vacuum_cost_delay": "0",
    },
)

#: The hints of a statement that made several tasks runnable, in one row, because rows in `outbox` would take ten times
#: the bytes. If the process that committed the row does not publish the hints in time, the relay moves them to
#: `outbox`.
outbox_batch = Table(
    "outbox_batch",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("task_ids", ARRAY(Uuid), nullable=False),
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("relay_at", _INSTANT, nullable=False),  # as in `outbox`
    Index("outbox_batch_relay_at", "relay_at"),
    postgresql_with={
        "autovacuum_vacuum_scale_factor": "0",
        "autovacuum_vacuum_threshold": "1000",
        "autovacuum_vacuum_cost_delay": "0",
    },
)

#: The processes that claim tasks. A worker writes its row when it starts, and again with each heartbeat.
worker = Table(
    "worker",
    metadata,
    # A new id for each start of the process. With a reused id, the tasks that a previous process had leased would seem
    # to run still.
    Column("id", Uuid, primary_key=True),
    # The number of the worker's advisory lock (its presence). `present`: whether it held the lock at its last report.
    Column("presence_key", Integer, Identity(always=True), nullable=False, unique=True),
    Column("present", Boolean, nullable=False),
    # the last start or crash recovery of the PostgreSQL server, as of the worker's last report
    Column("incarnation", _INSTANT),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("version", Text, nullable=False),
    Column("queues", ARRAY(Text), nullable=False),
    Column("slots", ARRAY(Integer)),  # how many, for each of `queues`; NULL: a worker of an older release
    Column("pool", Text, nullable=False, server_default="default"),  # workers of a pool are scaled together
    Column("draining", Boolean, nullable=False, server_default="false"),  # the worker claims no further task
    # queue -> attempts that started in the minute before `seen_at`; a worker of an older release leaves it empty
    Column("starts_per_minute", JSONB, nullable=False, server_default="{}"),
    Column("started_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("seen_at", _INSTANT, nullable=False, server_default=_NOW),
    # `pipeline.step` of each handler that the worker has; NULL: too many, or a worker of an older release
    Column("handlers", ARRAY(Text)),
)

#: The handlers of workers that have ended. The handlers of a living worker are in its row of the table `worker`.
known_handler = Table(
    "known_handler",
    metadata,
    Column("name", Text, primary_key=True),  # `pipeline.step`
    Column("seen_at", _INSTANT, nullable=False),  # when the last worker with this handler was last seen
)

#: The units at which a duty failed. A duty is a maintenance loop of a worker, and a unit is one thing that it works on.
quarantine = Table(
    "quarantine",
    metadata,
    Column("duty", Text, nullable=False),
    Column("unit", Text, nullable=False),  # the id or key of the row or object that failed
    Column("failures", Integer, nullable=False),  # consecutive failures
    Column("error", JSONB, nullable=False),  # {code, message} of the last failure
    Column("failed_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("retry_at", _INSTANT, nullable=False),  # the duty skips the unit until then
    PrimaryKeyConstraint("duty", "unit"),
)

#: Which process has each role, and until when. A role is a piece of work that only one process at a time may do: a duty
#: of the leader, or the writing of an app's schedules.
leadership = Table(
    "leadership",
    metadata,
    Column("role", Text, primary_key=True),  # for example `sweeper`
    Column("owner", Uuid, nullable=False),
    Column("until", _INSTANT, nullable=False),
)

# The keys with which clients call the API. The secret of a key is not stored.
api_key = Table(
    "api_key",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("prefix", Text, nullable=False, unique=True),  # the key's public part, by which a request finds the row
    Column("secret_hash", LargeBinary, nullable=False),  # SHA-256 of a 256-bit random secret
    Column("tenant_id", Text, nullable=False),
    Column("client_id", Text, nullable=False),
    Column("scopes", ARRAY(Text), nullable=False),
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("expires_at", _INSTANT),
    Column("revoked_at", _INSTANT),
    Column("last_used_at", _INSTANT),
    Column("quota_key", Text),  # the prefix of the first key in its chain of rotations; NULL: `prefix`
)

#: The decisions of people about failed steps whose outcome the platform could not know. (These are not the settlements
#: of attempts.) Each such failure has one row. An order is what the step requested from another system, for example
#: from a provider.
settlement = Table(
    "settlement",
    metadata,
    Column("task_id", Uuid, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("tenant_id", Text, nullable=False),
    # adopt: an order that exists in the other system becomes the step's order; again: the step orders again; give_up:
    # the job stays failed
    Column("action", Text, nullable=False),
    Column("system", Text),  # the system that has the adopted order, for example a provider
    Column("ref", Text),  # the adopted order's id in that system
    Column("actor", Text, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    PrimaryKeyConstraint("task_id", "epoch"),
    CheckConstraint("action IN ('adopt', 'again', 'give_up')", name="action_known"),
    Index("settlement_job", "job_id"),
    # so that an order belongs to one job only
    Index("settlement_adopted", "tenant_id", "system", "ref", unique=True, postgresql_where=text("ref IS NOT NULL")),
)

#: The idempotency keys of requests, with the stored answers (idempotency.py).
idempotency = Table(
    "idempotency",
    metadata,
    Column("tenant_id", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("request_hash", LargeBinary, nullable=False),
    Column("status_code", SmallInteger),  # NULL while the first request is in flight
    Column("body", LargeBinary),
    Column("locked_until", _INSTANT, nullable=False),  # after this, a first request without an answer counts as dead
    Column("expires_at", _INSTANT, nullable=False),
    PrimaryKeyConstraint("tenant_id", "key"),
    Index("idempotency_expires", "expires_at"),
)
