"""Declares the tables of workflows: the journal, and the signals that clients send. The journal has the calls of each
workflow with their results, from which a worker resumes the workflow. tables.py declares the tables of jobs and tasks.

A change here needs a migration.
"""

from __future__ import annotations

from sqlalchemy import (
    TIMESTAMP,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
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

#: The calls of a workflow. A call's place is its branch of the workflow's code, and its number in that branch.
journal = Table(
    "journal",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    # Empty for the workflow's function itself. Each branch of a gather (calls at the same time) has its own name.
    Column("branch", Text, nullable=False),
    Column("number", Integer, nullable=False),  # counted from 1 in each branch
    # run: starts a task of this job; start: starts another job; result: waits for another job; sleep: waits for a time;
    # signal: waits for a signal; call: has the result of a plain function; patch: has the path (old or new) that the
    # workflow takes through changed code
    Column("kind", Text, nullable=False),
    # The name of what the call is about: a task, a signal, a function or a patch. If the kind is `start` or `result`
    # and the name has a `#` (`charge#1`), the row belongs to a `ctx.run` of a task with a concurrency limit. Another
    # job does the work of such a call.
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),  # open: the call has not ended; any other state: how it ended
    Column("value", JSONB),  # a result that the workflow recorded, or {code, message} of a failed call
    Column("child_id", Uuid),  # kind `run`: a task of this job; kinds `start` and `result`: another job
    # Kinds `sleep` and `signal`: when the wait ends by itself. Kind `result`: when the other job ended. The platform
    # writes this time when it wakes the workflow because of that end. (A job that is retried may end once more.)
    Column("due_at", _INSTANT),
    Column("epoch", Integer, nullable=False),  # of the lease that wrote the row
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    PrimaryKeyConstraint("job_id", "branch", "number"),
    CheckConstraint(
        "kind IN ('run', 'sleep', 'signal', 'start', 'result', 'call', 'patch')",
        name="kind_known",
    ),
    CheckConstraint("state IN ('open', 'done', 'failed', 'timed_out', 'cancelled')", name="state_known"),
    # Finds the calls with which workflows started another job (`child_id`), or wait for its end.
    Index("journal_child", "child_id", postgresql_where=text("kind IN ('start', 'result') AND state = 'open'")),
    # Finds the waits of a workflow for signals. A signal that arrives ends a wait for its name.
    Index("journal_waits", "job_id", "name", postgresql_where=text("kind = 'signal' AND state = 'open'")),
)

#: Signals (payloads that clients send to a run) that the run's workflow has not consumed. When the workflow consumes a
#: signal, the payload moves to the journal.
signal = Table(
    "signal",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), nullable=False),
    Column("tenant_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("at", _INSTANT, nullable=False, server_default=_NOW),
    Index("signal_job_id", "job_id", "id"),
)
