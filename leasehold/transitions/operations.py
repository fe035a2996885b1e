"""SQL of bulk operations (jobs that act on many other jobs): locks the jobs of a batch, and records refused jobs. It
also counts how the canary jobs (the few jobs with which an operation begins) ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.db.job_reads import LIVES

#: Action -> an SQL condition, which says whether the job `j` is a target of the action. $2: when the operation was
#: submitted; $3: the tenant. A job that has changed since the filter found it may no longer be a target. `LIVES`: the
#: job is neither deleted nor past its retention. `unindexed`: the jobs are found by their ids, without a partial index.
_IS_TARGET = {
    "retry": unindexed(f"j.tenant_id = $3 AND j.status = 'failed' AND j.finished_at <= $2::timestamptz AND {LIVES}"),
    "cancel": unindexed(
        "j.tenant_id = $3 AND j.finished_at IS NULL AND j.status <> 'cancel_requested'"
        " AND j.created_at <= $2::timestamptz"
    ),
    "delete": unindexed(f"j.tenant_id = $3 AND j.created_at <= $2::timestamptz AND {LIVES}"),
}
#: `gated`: the job has concurrency limits. `notify`: a webhook or a callback URL waits for its end.
_COLUMNS = """j.id, j.tenant_id, j.pipeline, j.status, j.params, j.priority, j.exclusive_key, j.dedupe_key, j.gated,
    j.notify, j.finished_at,
    r.job_id IS NOT NULL AS is_run, r.template, r.version, r.scope, r.scope_id,
    (SELECT t.queue FROM task t WHERE t.job_id = j.id ORDER BY t.position, t.step LIMIT 1) AS queue"""


def _lock(action: str) -> str:
    """SQL: the statement that locks the jobs of a batch that are targets of `action`."""
    return f"""
-- operation_{action}
SELECT {_COLUMNS} FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.id = ANY($1::uuid[]) AND {_IS_TARGET[action]}
ORDER BY j.id FOR UPDATE OF j SKIP LOCKED
"""


# The statements pass over jobs that another transaction has locked, because a transaction that holds row locks must not
# wait for further locks.
RETRIED, CANCELLED, DELETED = _lock("retry"), _lock("cancel"), _lock("delete")  # `leasehold sql` lists them by name
LOCK = {"retry": RETRIED, "cancel": CANCELLED, "delete": DELETED}
# Action -> a statement that reads the targets among the jobs $1, also those that another transaction has locked.
_TARGETS = {
    action: f"SELECT j.id FROM job j WHERE j.id = ANY($1::uuid[]) AND {is_target}"
    for action, is_target in _IS_TARGET.items()
}

# $1 the operation, $2 its tenant, $3 to $5 the jobs, the codes and the details.
RECORD = """
-- operation_record
INSERT INTO operation_refusal (operation_id, job_id, tenant_id, code, detail)
SELECT $1, r.job_id, $2, r.code, r.detail FROM unnest($3::uuid[], $4::text[], $5::text[]) AS r(job_id, code, detail)
ON CONFLICT (operation_id, job_id) DO NOTHING
"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A job that the operation did not act on. `code`: the stable name of the reason. `detail`: a sentence."""

    job_id: UUID
    code: str
    detail: str


async def lock(
    connection: Connection, action: str, job_ids: Sequence[UUID], tenant_id: str, at: datetime
) -> tuple[Sequence[Any], list[UUID]]:
    """Lock the jobs that are still targets, by ascending id. `at`: when the operation was submitted. Returns their
    rows, and the ids of the targets that another transaction has locked.
    """
    rows = await connection.fetch(LOCK[action], list(job_ids), at, tenant_id)
    missing_ids = set(job_ids) - {row["id"] for row in rows}
    if not missing_ids:
        return rows, []
    locked_by_others = await connection.fetch(_TARGETS[action], list(missing_ids), at, tenant_id)
    return rows, [row["id"] for row in locked_by_others]


# $1 the canary jobs, $2 only jobs of this tenant (NULL: of any tenant).
_CANARY = """
-- operation_canary
SELECT count(*) FILTER (WHERE j.finished_at IS NULL) AS unfinished,
       count(*) FILTER (WHERE j.finished_at IS NOT NULL AND j.status <> 'succeeded') AS unsuccessful
FROM job j WHERE j.id = ANY($1::uuid[]) AND ($2::text IS NULL OR j.tenant_id = $2)
"""


async def canary(
    connection: Connection, job_ids: Sequence[UUID], of_tenant: str | None, action: str
) -> tuple[int, int]:
    """How many of the canary jobs have not ended, and how many have ended without success. If `action` is not `retry`,
    the second number is 0, because no other action lets a job succeed. `of_tenant`: count only jobs of this tenant;
    None: of any tenant.
    """
    row = await connection.fetchrow(_CANARY, list(job_ids), of_tenant)
    assert row is not None
    return row["unfinished"], row["unsuccessful"] if action == "retry" else 0


async def has_failed(connection: Connection, task_id: UUID, codes: Sequence[str]) -> bool:
    """Whether an attempt of the task has failed with one of these codes."""
    return bool(
        await connection.fetchval(
            "SELECT EXISTS (SELECT FROM failure WHERE task_id = $1 AND code = ANY($2::text[]))", task_id, list(codes)
        )
    )


async def record(connection: Connection, operation_id: UUID, tenant_id: str, refusals: Sequence[Refusal]) -> None:
    """Record the jobs that the operation did not act on. A job that is recorded already keeps its first refusal."""
    await connection.execute(
        RECORD,
        operation_id,
        tenant_id,
        [refusal.job_id for refusal in refusals],
        [refusal.code for refusal in refusals],
        [refusal.detail for refusal in refusals],
    )
