"""The schema of the conversion door: whose conversion a job is, and what was sent."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Index, Table, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB

from leasehold.tables import metadata

conversion = Table(
    "conversion",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("user_id", Text, nullable=False),
    Column("owner_tenant", Text),  # the client's own `tenant_id`: told back, and never a right
    Column("source_filename", Text, nullable=False),
    Column("input", JSONB, nullable=False),  # {filename, object_key, size_bytes, ref_images_count}
    # Lists, newest first: of a tenant, and of one of its users.
    Index("conversion_newest", "tenant_id", text("job_id DESC")),
    Index("conversion_of_user", "tenant_id", "user_id", text("job_id DESC")),
)
