"""The media row before its job: registered, then uploaded with a job, or refused. From there on the job's state
is the media's.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from leasehold.database import Connection
from leasehold.transitions import limits
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

REGISTER = """
-- upload
INSERT INTO media (id, tenant_id, original_key, content_type, file_name, expires_at)
VALUES ($1, $2, $3, $4, $5, clock_timestamp() + $6::interval)
"""

# An expired row may lose its object to the sweeper at any moment, so it is left alone.
COMPLETE_UPLOAD = """
-- upload_complete
UPDATE media
SET status = 'UPLOADED', size = $3, job_id = $4, expires_at = NULL, updated_at = clock_timestamp()
WHERE id = $1 AND tenant_id = $2 AND status = 'INIT' AND expires_at > clock_timestamp()
RETURNING id
"""

REFUSE_UPLOAD = """
-- upload_refuse
UPDATE media
SET status = 'FAILED', size = $3, error = $4, expires_at = clock_timestamp() + $5::interval,
    updated_at = clock_timestamp()
WHERE id = $1 AND tenant_id = $2 AND status = 'INIT'
RETURNING id
"""


async def register(
    connection: Connection,
    media_id: UUID,
    tenant_id: str,
    *,
    original_key: str,
    content_type: str,
    file_name: str,
    lives: timedelta,
) -> None:
    """- -> INIT. An upload that is not completed within `lives` is forgotten by the sweeper."""
    await connection.execute(REGISTER, media_id, tenant_id, original_key, content_type, file_name, lives)


async def complete_upload(
    connection: Connection, media_id: UUID, tenant_id: str, size: int, job: NewJob
) -> Submitted | None:
    """INIT -> UPLOADED with its job, in the caller's transaction. Of many callers at once exactly one submits.

    None: the row is not INIT any more (read it to see what became of it), is expired, or is not the tenant's.
    """
    if await connection.fetchval(COMPLETE_UPLOAD, media_id, tenant_id, size, job.id) is None:
        return None
    return await limits.submit(connection, job)


async def refuse_upload(
    connection: Connection,
    media_id: UUID,
    tenant_id: str,
    *,
    size: int,
    error: Mapping[str, Any],
    kept: timedelta,
) -> bool:
    """INIT -> FAILED: the object can never be processed. False: the row is not INIT any more.

    `error` is {code, message, retryable}; row and object are forgotten after `kept`.
    """
    return await connection.fetchval(REFUSE_UPLOAD, media_id, tenant_id, size, dict(error), kept) is not None
