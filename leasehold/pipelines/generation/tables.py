"""The tables of generations: `generation` (one row for each job, with the client's own task_id) and `source_image`."""

from __future__ import annotations

from sqlalchemy import (
    TIMESTAMP,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    LargeBinary,
    Table,
    Text,
    Uuid,
    func,
)

from leasehold.db.tables import metadata

generation = Table(
    "generation",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("task_id", Text, nullable=False),  # the client's own id of its request
    Column("kind", Text, nullable=False),
    # The label of the workers that may submit the order. The concurrency limit of this server counts the generation.
    Column("server_id", Text, nullable=False),
    # The hash of the client's request. A request with the same task_id and another hash is a conflict.
    Column("request_hash", LargeBinary, nullable=False),
    Column("created_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("consumed_at", TIMESTAMP(timezone=True)),  # when a client consumed the result; no later request finds it
    CheckConstraint("kind IN ('image', 'video')", name="kind"),
    Index("generation_task_id", "tenant_id", "task_id", unique=True),
)

# An image that a client has uploaded. `key`: the key of the object that has the image's bytes. `size`: the number of
# these bytes; 0 in a row that an earlier release of Leasehold has written.
source_image = Table(
    "source_image",
    metadata,
    Column("key", Text, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("expires_at", TIMESTAMP(timezone=True), nullable=False),
    Column("size", BigInteger, nullable=False, server_default="0"),
    Index("source_image_expires", "expires_at"),
    Index("source_image_tenant", "tenant_id"),  # for the bytes that a tenant has stored
)
