"""Writes the row of a conversion together with its job, and reads conversions by id or as a list. The conversion
endpoints call this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection, row_count
from leasehold.db.job_reads import LIVES
from leasehold.transitions import limits
from leasehold.transitions.jobs import NewJob
from leasehold.transitions.limits import Submitted

Row: TypeAlias = asyncpg.Record
#: The total of a list is counted up to this number.
MAX_COUNTED = 10_000
#: How long the API answers `expired` for a deleted conversion. After that it answers `job_not_found`.
REMEMBER_EXPIRED = timedelta(days=90)


class Busy(Exception):
    """The user has another unfinished conversion. `job_id`: the job of this conversion; None: the conversion has ended
    meanwhile.
    """

    def __init__(self, job_id: UUID | None) -> None:
        super().__init__(f"unfinished: {job_id}")
        self.job_id = job_id


@dataclass(frozen=True, slots=True)
class NewConversion:
    """A conversion to write. The job's `exclusive_key` is the user's id. A unique index allows only one unfinished job
    for each such key. `owner_tenant`: the `tenant_id` that the client wrote into its form. It grants nothing, because
    all rights follow from the job's tenant. `input`: the client's request, as the API shows it.
    """

    job: NewJob
    user_id: str
    client_id: str
    owner_tenant: str | None
    source_filename: str
    input: Mapping[str, Any]


async def create(connection: Connection, new: NewConversion) -> Submitted:
    """Write the job and the row of its conversion. If the user has an unfinished conversion, raises Busy and writes
    nothing.
    """
    try:
        async with connection.transaction():
            submitted = await limits.submit(connection, new.job)
            await connection.execute(
                "INSERT INTO conversion (job_id, tenant_id, user_id, owner_tenant, source_filename, input, client_id)"
                " VALUES ($1, $2, $3, $4, $5, $6, $7)",
                new.job.id, new.job.tenant_id, new.user_id, new.owner_tenant, new.source_filename, dict(new.input),
                new.client_id,
            )  # fmt: skip
    except asyncpg.UniqueViolationError as error:
        if error.constraint_name != "job_exclusive":
            raise
        raise Busy(await _unfinished_job(connection, new)) from None
    return submitted


# The job of the user's unfinished conversion; None: that conversion has ended meanwhile.
async def _unfinished_job(connection: Connection, new: NewConversion) -> UUID | None:
    job_id: UUID | None = await connection.fetchval(
        "SELECT id FROM job WHERE tenant_id = $1 AND pipeline = $2 AND exclusive_key = $3 AND finished_at IS NULL",
        new.job.tenant_id,
        new.job.pipeline.name,
        new.job.exclusive_key,
    )
    return job_id


# The conversions `c` with their jobs `j`, steps and outputs. A condition follows.
_CONVERSION = """
-- conversion
SELECT c.*, j.status, j.event_seq, j.params, j.error, j.created_at, j.finished_at,
    -- When the conversion expires. While the job is unfinished: the earliest possible time. Afterwards: the exact time.
    coalesce(j.expires_at, j.created_at + make_interval(secs => j.keep_seconds)) AS expires_at,
    greatest(j.created_at, j.started_at, j.finished_at,
             (SELECT greatest(max(t.started_at), max(t.finished_at), max(p.at))
              FROM task t LEFT JOIN progress p ON p.task_id = t.id WHERE t.job_id = c.job_id)) AS updated_at,
    j.expires_at <= clock_timestamp() AS expired,
    (SELECT jsonb_agg(jsonb_build_object('step', t.step, 'status', t.status, 'started_at', t.started_at,
        'finished_at', t.finished_at, 'percent', p.percent, 'value', r.value) ORDER BY t.position)
     FROM task t LEFT JOIN progress p ON p.task_id = t.id LEFT JOIN result r ON r.task_id = t.id
     WHERE t.job_id = c.job_id) AS steps,
    (SELECT jsonb_agg(jsonb_build_object('name', o.name, 'key', o.key, 'size', o.size, 'sha256', o.sha256,
        'content_type', o.content_type) ORDER BY o.name)
     FROM output o WHERE o.job_id = c.job_id) AS outputs
FROM conversion c JOIN job j ON j.id = c.job_id
"""


async def find(connection: Connection, tenant_id: str, job_id: UUID) -> Row | None:
    """The conversion with its job, steps and outputs. Returns None if the tenant has no such conversion."""
    return await connection.fetchrow(f"{_CONVERSION} WHERE c.tenant_id = $1 AND c.job_id = $2", tenant_id, job_id)


async def is_expired(connection: Connection, tenant_id: str, job_id: UUID) -> bool:
    """Whether this conversion of the tenant is deleted, and still remembered."""
    is_remembered: bool = await connection.fetchval(
        "SELECT EXISTS (SELECT FROM expired_conversion WHERE job_id = $1 AND tenant_id = $2)", job_id, tenant_id
    )
    return is_remembered


async def forget_expired(connection: Connection, limit: int = 1000) -> bool:
    """Forget conversions that were deleted (at `forgotten_at`) more than REMEMBER_EXPIRED ago. Housekeeping, a loop of
    the leader, calls this function. Returns whether more rows may be due.
    """
    status = await connection.execute(
        "DELETE FROM expired_conversion WHERE job_id IN (SELECT job_id FROM expired_conversion"
        " WHERE forgotten_at < statement_timestamp() - $1::interval ORDER BY forgotten_at LIMIT $2)",
        REMEMBER_EXPIRED,
        limit,
    )
    return row_count(status) >= limit


# SQL condition: the conversions that a list shows. $1: the tenant. $2: the user (NULL: any). $3: the states of the jobs
# (NULL: any). LIVES: the job is not deleted and not past its retention.
_SELECTED = (
    "c.tenant_id = $1 AND ($2::text IS NULL OR c.user_id = $2) AND ($3::text[] IS NULL OR j.status = ANY($3::text[]))"
    f" AND {LIVES}"
)


async def newest(
    connection: Connection,
    tenant_id: str,
    *,
    user_id: str | None,
    states: Sequence[str] | None,
    before: UUID | None,
    limit: int,
) -> tuple[Sequence[Row], int]:
    """A page of conversions, newest first, and the number of conversions on all pages (counted up to MAX_COUNTED).

    `before`: the last job of the previous page; None: the first page. If `user_id` is None, the conversions of all
    users count. If `states` is None, all states count.
    """
    page = await connection.fetch(
        f"{_CONVERSION} WHERE {_SELECTED} AND ($4::uuid IS NULL OR c.job_id < $4) ORDER BY c.job_id DESC LIMIT $5",
        tenant_id, user_id, states, before, limit,
    )  # fmt: skip
    total: int = await connection.fetchval(
        "SELECT count(*) FROM (SELECT 1 FROM conversion c JOIN job j ON j.id = c.job_id"
        f" WHERE {_SELECTED} LIMIT {MAX_COUNTED}) AS counted",
        tenant_id,
        user_id,
        states,
    )
    return page, total
