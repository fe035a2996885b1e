"""The table `media`. It gets a row when the upload of a picture is announced. The row gets a job later."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text, Uuid, func, text
from sqlalchemy.dialects.postgresql import JSONB

from leasehold.db.tables import metadata

_INSTANT = TIMESTAMP(timezone=True)
_NOW = func.clock_timestamp()

media = Table(
    "media",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    # INIT, UPLOADED, or FAILED if the object was refused before it had a job. Once there is a job, clients see the
    # job's state instead, as PROCESSING, READY or FAILED.
    Column("status", Text, nullable=False, server_default="INIT"),
    # The foreign key is deferred, because the update that sets job_id runs before the job is inserted, in the same
    # transaction.
    Column(
        "job_id",
        Uuid,
        ForeignKey("job.id", ondelete="SET NULL", deferrable=True, initially="DEFERRED"),
        unique=True,
    ),
    Column("original_key", Text, nullable=False, unique=True),
    Column("content_type", Text, nullable=False),
    Column("file_name", Text, nullable=False),
    Column("size", BigInteger),  # bytes of the completed upload, as found in the store
    Column("error", JSONB),  # {code, message, retryable} of a refused object
    Column("created_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("updated_at", _INSTANT, nullable=False, server_default=_NOW),
    Column("expires_at", _INSTANT),  # after this time a worker deletes the picture, if it has no job
    Column("deleted_at", _INSTANT),  # when a client deleted the picture; no request reads it, and a worker removes it
    CheckConstraint("status IN ('INIT', 'UPLOADED', 'FAILED')", name="status_known"),
    CheckConstraint("(status = 'FAILED') = (error IS NOT NULL)", name="failed_says_why"),
    Index("media_expires", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("media_tenant", "tenant_id", postgresql_include=["size"]),  # for the sum of the bytes stored for a tenant
)
