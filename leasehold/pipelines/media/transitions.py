"""Writes a picture's row: registers the picture, completes its upload with a job, refuses the upload, or deletes the
picture. Each statement names the states from which it may change the row.

The upload endpoints call these functions. Once there is a job, the job's state is the picture's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.limits import uploads
from leasehold.transitions import jobs, limits
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

REGISTER = """
-- upload
INSERT INTO media (id, tenant_id, original_key, content_type, file_name, expires_at)
VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6::interval)
"""

# Lets a client send to the key of an upload for a longer time. `writable_until`: a transfer may begin until then.
# `forget_at`: no transfer can arrive after this time. `look_at`: when housekeeping (a loop of the leader) next
# inspects the object at the key. $1: the key; $2: the tenant; $3: for how many seconds from now a transfer may begin;
# $4: how long a transfer may take; $5: the seconds until the next inspection.
EXTEND_UPLOAD = """
-- upload_extend
UPDATE upload SET writable_until = clock_timestamp() + make_interval(secs => $3),
    forget_at = clock_timestamp() + make_interval(secs => $3) + $4::interval,
    look_at = least(look_at, clock_timestamp() + make_interval(secs => $5))
WHERE key = $1 AND tenant_id = $2 AND open
  AND EXISTS (SELECT FROM media WHERE original_key = $1 AND status = 'INIT'
              AND expires_at > clock_timestamp() + make_interval(secs => $3))
RETURNING key
"""

# An expired row cannot be completed, because housekeeping may delete its object at any moment.
COMPLETE_UPLOAD = """
-- upload_complete
UPDATE media
SET status = 'UPLOADED', size = $3, job_id = $4, expires_at = NULL, updated_at = clock_timestamp()
WHERE id = $1 AND tenant_id = $2 AND status = 'INIT' AND expires_at > clock_timestamp() AND deleted_at IS NULL
RETURNING id
"""

# `size` stays NULL, because a refused object is deleted, and must not count among the bytes that are stored for the
# tenant.
REFUSE_UPLOAD = """
-- upload_refuse
UPDATE media
SET status = 'FAILED', error = $3, expires_at = clock_timestamp() + $4::interval,
    updated_at = clock_timestamp()
WHERE id = $1 AND tenant_id = $2 AND status = 'INIT' AND deleted_at IS NULL
RETURNING id
"""

# If the picture has no job, housekeeping deletes the row at its next run. Otherwise housekeeping deletes the row with
# the job.
DELETE_MEDIA = """
-- media_delete
UPDATE media
SET deleted_at = clock_timestamp(), updated_at = clock_timestamp(),
    expires_at = CASE WHEN job_id IS NULL THEN clock_timestamp() END
WHERE id = $1 AND tenant_id = $2 AND deleted_at IS NULL
RETURNING job_id, original_key
"""


async def register(
    connection: Connection,
    media_id: UUID,
    tenant_id: str,
    *,
    original_key: str,
    content_type: str,
    file_name: str,
    lifetime: timedelta,
) -> None:
    """Write the row of a new picture, with the status INIT. Housekeeping deletes an upload that is not completed within
    `lifetime`.
    """
    await connection.execute(REGISTER, media_id, tenant_id, original_key, content_type, file_name, lifetime)


async def extend_upload(connection: Connection, tenant_id: str, key: str, seconds: float) -> bool:
    """Let a client send to `key` for `seconds` from now. Returns False if the upload has ended, or expires within this
    time.
    """
    extended_key = await connection.fetchval(
        EXTEND_UPLOAD, key, tenant_id, seconds, uploads.SLOWEST_TRANSFER, uploads.INSPECTION_SECONDS
    )
    return extended_key is not None


async def complete_upload(
    connection: Connection, media_id: UUID, tenant_id: str, size: int, job: NewJob
) -> Submitted | None:
    """Change the status from INIT to UPLOADED, and submit the job, in the caller's transaction. If several callers try
    this at once, exactly one of them succeeds.

    Returns None if the row is no longer INIT (read the row to see why), is expired, or belongs to another tenant.
    """
    if await connection.fetchval(COMPLETE_UPLOAD, media_id, tenant_id, size, job.id) is None:
        return None
    return await limits.submit(connection, job)


async def refuse_upload(
    connection: Connection,
    media_id: UUID,
    tenant_id: str,
    *,
    error: Mapping[str, Any],
    keep: timedelta,
) -> bool:
    """Change the status from INIT to FAILED, because the object can never be processed. Returns False if the row is no
    longer INIT.

    `error`: {code, message, retryable}. Housekeeping deletes the row and the object after `keep`.
    """
    return await connection.fetchval(REFUSE_UPLOAD, media_id, tenant_id, dict(error), keep) is not None


@dataclass(frozen=True, slots=True)
class Deleted:
    """What the caller still has to delete. `prefix`: the prefix of the job's objects, if no worker writes them now.
    `ended_jobs`: contains the job if the cancel has ended it already. The caller counts the job in the metrics.
    """

    original_key: str
    job_id: UUID | None
    prefix: str | None
    ended_jobs: list[JobEnded]


async def delete(connection: Connection, media_id: UUID, tenant_id: str, by: str) -> Deleted | None:
    """Mark the picture as deleted, in any status, in the caller's transaction. From now on requests no longer find it.
    Its job is cancelled. Once the job has ended, the next housekeeping deletes the rows and objects. `by`: who deletes
    the picture. Returns None if the tenant has no such picture.
    """
    row = await connection.fetchrow(DELETE_MEDIA, media_id, tenant_id)
    if row is None:
        return None
    job_id, ended, prefix = row["job_id"], [], None
    if job_id is not None:
        # `forced`: even if the pipeline forbids cancelling.
        cancellation = await jobs.request_cancel(
            connection, [job_id], tenant_id, reason="the media was deleted", by=by, forced=True
        )
        ended = cancellation.ended
        prefix = await jobs.expire_early(connection, job_id, tenant_id)
    await uploads.close(connection, tenant_id, row["original_key"], keep=None)  # delete an object that arrives later
    return Deleted(row["original_key"], job_id, prefix, ended)
