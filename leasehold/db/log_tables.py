"""Declares the tables for what attempts log (lines), and for what they emit as a stream (chunks). A change here needs a
migration.

The table `tail` has a row for each job that has lines or chunks. The row has the numbers of the job's last line and
last chunk. The foreign keys of the other tables lead to `tail`, not to `job`, because an insert locks the row to which
its foreign key leads. With a foreign key to `job`, the insert would wait for each settlement (the end of an attempt)
that has locked the job's row. Exception: the first insert for a job may wait, because it inserts the row of `tail`,
whose foreign key leads to `job`.
"""

from __future__ import annotations

from sqlalchemy import (
    TIMESTAMP,
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Integer,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    func,
)
from sqlalchemy.dialects.postgresql import JSONB

from leasehold.db.tables import metadata

#: The numbers of each job's last line and last chunk. A job that neither logs nor emits has no row.
tail = Table(
    "tail",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("log_seq", BigInteger, nullable=False, server_default="0"),  # the number of the last line
    Column("stream_seq", BigInteger, nullable=False, server_default="0"),  # the number of the last chunk
    postgresql_with={"fillfactor": "70"},  # leaves room in the page for the new versions of an updated row
)

#: Lines that attempts have logged. A row has several lines of one attempt. Lines are numbered twice: `first` is a
#: number among the lines of one attempt, and `last` is a number among all lines of the job. A worker may repeat an
#: insert whose answer it did not get. `job_log_once` keeps the repetition from adding the lines again.
job_log = Table(
    "job_log",
    metadata,
    Column("job_id", Uuid, ForeignKey("tail.job_id", ondelete="CASCADE"), nullable=False),
    Column("last", BigInteger, nullable=False),  # the number of the row's last line in its job
    Column("tenant_id", Text, nullable=False),
    Column("task_id", Uuid, nullable=False),
    Column("step", Text, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("first", Integer, nullable=False),  # the number of the row's first line in its attempt
    Column("n", Integer, nullable=False),  # lines in the row
    Column("lines", JSONB, nullable=False),
    Column("at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    PrimaryKeyConstraint("job_id", "last"),
    UniqueConstraint("task_id", "epoch", "first", name="job_log_once"),
)

#: Chunks that attempts have emitted. A row has several chunks of one attempt. Chunks are numbered as lines are, and
#: `job_stream_once` has the same purpose as `job_log_once`.
job_stream = Table(
    "job_stream",
    metadata,
    Column("job_id", Uuid, ForeignKey("tail.job_id", ondelete="CASCADE"), nullable=False),
    Column("last", BigInteger, nullable=False),  # the number of the row's last chunk in its job
    Column("tenant_id", Text, nullable=False),
    Column("task_id", Uuid, nullable=False),
    Column("step", Text, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("first", Integer, nullable=False),  # the number of the row's first chunk in its attempt
    Column("n", Integer, nullable=False),  # chunks in the row
    Column("restarts", Boolean, nullable=False),  # true: the chunks of earlier attempts of the step are void
    Column("chunks", JSONB, nullable=False),
    Column("at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    PrimaryKeyConstraint("job_id", "last"),
    UniqueConstraint("task_id", "epoch", "first", name="job_stream_once"),
)
