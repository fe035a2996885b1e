"""Finds runs by their Celery ids (domain/celery_ids.py)."""

from __future__ import annotations

from uuid import UUID

from leasehold.db.database import Connection, lock_name
from leasehold.db.job_reads import Row
from leasehold.domain.celery_ids import TAG, uuid_of
from leasehold.domain.errors import Conflict

# $1 the tenant, $2 the run.
_BY_ID = """
-- celery_run_by_id
SELECT id, pipeline FROM job WHERE id = $2 AND tenant_id = $1
"""

# $1 the tenant, $2 the name of the tag, $3 the Celery id.
_BY_TAG = """
-- celery_run_by_tag
SELECT j.id, j.pipeline FROM job_tag g JOIN job j ON j.id = g.job_id
WHERE g.tenant_id = $1 AND g.name = $2 AND g.value = $3 ORDER BY g.job_id DESC LIMIT 1
"""


async def find(connection: Connection, tenant_id: str, celery_id: str) -> UUID | None:
    """The tenant's run with this Celery id, or None. The Celery id may also be the run's own id."""
    row = await _row(connection, tenant_id, celery_id)
    return None if row is None else row["id"]


async def written_earlier(connection: Connection, tenant_id: str, celery_id: str, task: str) -> UUID | None:
    """The run that an earlier submission with this Celery id has written, or None. Until the caller's transaction ends,
    no other transaction can write a run with this Celery id. Raises Conflict if the earlier run is not of the Celery
    task `task`, which is the run's pipeline.
    """
    await lock_name(connection, f"celery_id {tenant_id} {celery_id}")
    row = await _row(connection, tenant_id, celery_id)
    if row is None:
        return None
    if row["pipeline"] != task:
        raise Conflict("run_exists", "Another run has one of these ids.")
    run_id: UUID = row["id"]
    return run_id


async def _row(connection: Connection, tenant_id: str, celery_id: str) -> Row | None:
    own_id = uuid_of(celery_id)
    if own_id is not None and (row := await connection.fetchrow(_BY_ID, tenant_id, own_id)) is not None:
        return row
    return await connection.fetchrow(_BY_TAG, tenant_id, TAG, celery_id)
