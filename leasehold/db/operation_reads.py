"""Reads bulk operations (cancel, retry or delete all jobs of a filter), for the API and the console. A bulk operation
is a job of the pipeline `bulk_operation`. Its step keeps the progress in a row of the table `note`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection
from leasehold.db.job_reads import LIVES, Row

_COLUMNS = """
j.id, j.tenant_id, j.status, j.params, j.error, j.cancel, j.created_at, j.started_at, j.finished_at, j.event_seq,
(SELECT n.value FROM task t JOIN note n ON n.task_id = t.id WHERE t.job_id = j.id) AS note
"""

# The condition leaves out runs, because a tenant may have a template of its own that is named `bulk_operation`. Such a
# template was written before the platform had bulk operations.
_IS_OPERATION = "j.pipeline = 'bulk_operation' AND NOT EXISTS (SELECT FROM run r WHERE r.job_id = j.id)"

# $1 operation, $2 its tenant (NULL: any tenant). LIVES leaves out jobs that are deleted or past their retention.
FIND = f"""
-- operation_find
SELECT {_COLUMNS} FROM job j
WHERE j.id = $1 AND ($2::text IS NULL OR j.tenant_id = $2) AND {_IS_OPERATION} AND {LIVES}
"""

# $1 ids, $2 tenant (NULL: any tenant). A tenant finds only its operations on its own jobs. `of_tenant`: the tenant on
# whose jobs the operation acts; null: all tenants. An operation that an operator submits may act on the jobs of other
# tenants.
EXISTING = f"""
-- operation_existing
SELECT j.id FROM job j
WHERE j.id = ANY($1::uuid[]) AND ($2::text IS NULL OR j.tenant_id = $2 AND j.params ->> 'of_tenant' = $2)
  AND {_IS_OPERATION} AND {LIVES}
"""

# $1 tenant, $2 the last operation of the previous page (or NULL), $3 limit. $4: whether the page also has operations on
# the jobs of other tenants.
LIST = f"""
-- operation_list
SELECT {_COLUMNS} FROM job j
WHERE j.tenant_id = $1 AND {_IS_OPERATION} AND ($2::uuid IS NULL OR j.id < $2) AND {LIVES}
  AND ($4 OR j.params ->> 'of_tenant' = j.tenant_id)
ORDER BY j.id DESC LIMIT $3
"""

# $1 operation, $2 its tenant, $3 the last job of the previous page (or NULL), $4 limit.
REFUSALS = """
-- operation_refusals
SELECT r.job_id, r.code, r.detail, r.at FROM operation_refusal r
WHERE r.operation_id = $1 AND r.tenant_id = $2 AND ($3::uuid IS NULL OR r.job_id < $3)
ORDER BY r.job_id DESC LIMIT $4
"""


async def find(connection: Connection, tenant_id: str | None, operation_id: UUID) -> Row | None:
    """The bulk operation, or None. With `tenant_id` None, the operations of all tenants are searched."""
    return await connection.fetchrow(FIND, operation_id, tenant_id)


async def existing(connection: Connection, tenant_id: str | None, operation_ids: Sequence[UUID]) -> set[UUID]:
    """The ids in `operation_ids` that are operations of the tenant on its own jobs. With `tenant_id` None, the ids that
    are operations of any tenant on any jobs.
    """
    rows = await connection.fetch(EXISTING, list(operation_ids), tenant_id)
    return {row["id"] for row in rows}


async def newest(
    connection: Connection, tenant_id: str, before: UUID | None, limit: int, *, beyond_tenant: bool
) -> Sequence[Row]:
    """At most `limit` operations that the tenant submitted, newest first. `before`: only operations that are older than
    this one. `beyond_tenant`: list also operations that act on the jobs of other tenants.
    """
    return await connection.fetch(LIST, tenant_id, before, limit, beyond_tenant)


async def refusals(
    connection: Connection, tenant_id: str, operation_id: UUID, before: UUID | None, limit: int
) -> Sequence[Row]:
    """At most `limit` jobs on which the operation could not act, by descending id. `tenant_id`: of the operation."""
    return await connection.fetch(REFUSALS, operation_id, tenant_id, before, limit)


async def count_unfinished(connection: Connection, tenant_id: str) -> int:
    """The number of the tenant's unfinished bulk operations."""
    counted: int = await connection.fetchval(
        f"SELECT count(*) FROM job j WHERE j.tenant_id = $1 AND {_IS_OPERATION} AND j.finished_at IS NULL",
        tenant_id,
    )
    return counted
