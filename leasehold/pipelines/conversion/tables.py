"""The tables of conversions. `conversion` has a row for each conversion, which is a job. `expired_conversion` has a row
for each deleted conversion. `promoted_object` records which tenant owns which key at the target. The target is the
bucket or HTTP file service to which a promote request copies artifacts.
"""

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
    # The value that the client sent as `tenant_id`. The API only gives it back. Access depends on the column
    # `tenant_id`.
    Column("owner_tenant", Text),
    Column("source_filename", Text, nullable=False),
    Column("input", JSONB, nullable=False),  # {filename, object_key, size_bytes, ref_images_count, ref_images_bytes}
    Column("client_id", Text),  # the client that created the conversion; NULL in rows older than this column
    Column("promoting_until", TIMESTAMP(timezone=True)),  # until then no second promote request may begin
    Column("promoted", JSONB),  # the keys at the target, once all artifacts are copied
    # For lists that show the newest first: the list of a tenant, and the list of one user of a tenant.
    Index("conversion_newest", "tenant_id", text("job_id DESC")),
    Index("conversion_of_user", "tenant_id", "user_id", text("job_id DESC")),
)

expired_conversion = Table(
    "expired_conversion",
    metadata,
    Column("job_id", Uuid, primary_key=True),
    Column("tenant_id", Text, nullable=False),
    # The time of the deletion.
    Column("forgotten_at", TIMESTAMP(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Index("expired_conversion_forgotten", "forgotten_at"),
)

promoted_object = Table(
    "promoted_object",
    metadata,
    Column("key", Text, primary_key=True),  # the key at the target, with the tenant's folder
    Column("tenant_id", Text, nullable=False),
    Column("job_id", Uuid),  # the job whose artifact lies there; NULL until a request has finished
    # The id of the promote request that has claimed the key, and is writing the object there. NULL: no request has.
    Column("turn", Uuid),
    Column("for_job", Uuid),  # the job that this request promotes
    # After this time the promote request counts as dead, and a worker undoes what the request did at the key.
    Column("until", TIMESTAMP(timezone=True)),
    # What the request may have done at the key. `created`: it created the object. `replaced`: it overwrote an object of
    # the tenant. `unsure`: the target does not report which. NULL: nothing yet.
    Column("reached", Text),
    Column("backup", Text),  # where our own store may have a copy of the object that the request replaces
    CheckConstraint("reached IN ('created', 'unsure', 'replaced')", name="reached_known"),
    CheckConstraint("(turn IS NULL) = (until IS NULL) AND (turn IS NULL) = (for_job IS NULL)", name="turn_ends"),
    # false <= true, so `<=` means "implies".
    CheckConstraint("(reached = 'replaced') <= (backup IS NOT NULL)", name="replaced_has_backup"),
    # Finds the keys of unfinished requests by their job, and by the time after which a request counts as dead.
    Index("promoted_object_turn", "for_job", "until", postgresql_where=text("turn IS NOT NULL")),
)
