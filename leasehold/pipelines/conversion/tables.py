"""The schema of the conversion door: whose conversion a job is, and what was sent."""

from __future__ import annotations

from sqlalchemy import TIMESTAMP, CheckConstraint, Column, ForeignKey, Index, Table, Text, Uuid, func, text
from sqlalchemy.dialects.postgresql import JSONB

from leasehold.db.tables import metadata

conversion = Table(
    "conversion",
    metadata,
    Column("job_id", Uuid, ForeignKey("job.id", ondelete="CASCADE"), primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("user_id", Text, nullable=False),
    Column("owner_tenant", Text),  # the client's own `tenant_id`: told back, and never a right
    Column("source_filename", Text, nullable=False),
    Column("input", JSONB, nullable=False),  # {filename, object_key, size_bytes, ref_images_count}
    Column("client_id", Text),  # whose key sent it; NULL: before that was noted
    Column("promoting_until", TIMESTAMP(timezone=True)),  # a request copies the artifacts until then
    Column("promoted", JSONB),  # the keys that the artifacts were copied to, once all of them were
    # Lists, newest first: of a tenant, and of one of its users.
    Index("conversion_newest", "tenant_id", text("job_id DESC")),
    Index("conversion_of_user", "tenant_id", "user_id", text("job_id DESC")),
)

expired_conversion = Table(
    "expired_conversion",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    Column("forgotten_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Index("expired_conversion_forgotten", "forgotten_at"),
)

promoted_object = Table(
    "promoted_object",
    metadata,
    Column("key", Text, primary_key=True),  # where it lies at the target, the tenant's folder included
    Column("tenant_id", Text, nullable=False),
    Column("job_id", Uuid),  # whose artifact lies there; NULL until a call has finished
    Column("turn", Uuid),  # the call that is writing it
    Column("for_job", Uuid),  # and what it promotes
    Column("until", TIMESTAMP(timezone=True)),  # that call is dead then, and what it did is taken back
    Column("reached", Text),  # what that call may have done there: created | unsure | replaced
    Column("backup", Text),  # where in our own store lies what it replaces
    CheckConstraint("reached IN ('created', 'unsure', 'replaced')", name="reached_known"),
    CheckConstraint("(turn IS NULL) = (until IS NULL) AND (turn IS NULL) = (for_job IS NULL)", name="turn_ends"),
    CheckConstraint("(reached = 'replaced') <= (backup IS NOT NULL)", name="replaced_has_backup"),
    # What calls are writing: by their job, and what the dead have left.
    Index("promoted_object_turn", "for_job", "until", postgresql_where=text("turn IS NOT NULL")),
)
