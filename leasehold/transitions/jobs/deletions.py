"""`expire_early` and `delete` end the retention of a job and of its objects early. `forget` deletes the rows.

A job with a leased step is never deleted. The worker needs the job's rows to settle the lease, and the job's events
must show how the lease ended. Such a job is cancelled first, and deleted when it has ended. The request to delete
sets `keep_seconds` to 0, so that retention deletes the job even if the process that got the request dies.

A job with a row in the table `run` is a run, which means that it executes a template. For such a job, `is_run` of the
tombstone is true.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Connection, row_count, unindexed, within_minute

# $1 job, $2 its tenant. `finished`: whether the job has ended already.
EXPIRE_EARLY = """
-- expire_early
UPDATE job
SET keep_seconds = 0, expires_at = CASE WHEN finished_at IS NOT NULL THEN clock_timestamp() END
WHERE id = $1 AND tenant_id = $2
RETURNING finished_at IS NOT NULL AS finished, output_prefix
"""


async def expire_early(connection: Connection, job_id: UUID, tenant_id: str) -> str | None:
    """Make retention delete the job as soon as the job has ended. Returns the prefix of the job's objects if the job
    has ended already. None: the job has not ended, or there is no such job.
    """
    row = await connection.fetchrow(EXPIRE_EARLY, job_id, tenant_id)
    return row["output_prefix"] if row is not None and row["finished"] else None


# $1 jobs, $2 their tenant. The statement changes only jobs that have ended. After it no reader finds these jobs, and
# retention may delete their objects and rows. `unindexed` keeps the planner from using an index for this condition,
# because the ids alone find the rows.
DELETE = f"""
-- job_delete
WITH deleted AS (
    UPDATE job SET keep_seconds = 0, expires_at = clock_timestamp()
    WHERE id = ANY($1::uuid[]) AND {unindexed("tenant_id = $2 AND finished_at IS NOT NULL")}
    RETURNING id, tenant_id, pipeline, output_prefix
), tombstones AS (
    INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)
    SELECT d.id, d.tenant_id, d.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = d.id), 'deleted' FROM deleted d
    ON CONFLICT (job_id) DO NOTHING
)
SELECT id, output_prefix FROM deleted
"""


async def delete(connection: Connection, job_id: UUID, tenant_id: str) -> str | None:
    """Hide an ended job from readers, who find a tombstone instead. After the commit, the caller must delete the job's
    objects, and then call `sweeps.forget_jobs` for its rows. If one of the two steps fails, retention does it later.

    Returns the prefix of the job's objects. None: the job has not ended, or there is no such job.
    """
    rows = await connection.fetch(DELETE, [job_id], tenant_id)
    return rows[0]["output_prefix"] if rows else None


async def delete_together(connection: Connection, job_ids: Sequence[UUID], tenant_id: str) -> list[UUID]:
    """Do what `delete` does, for many jobs. Returns the jobs that are deleted."""
    return [row["id"] for row in await connection.fetch(DELETE, list(job_ids), tenant_id)]


#: SQL: `job` has started no run that must still be cancelled. When a workflow does not succeed, a duty
#: (workflows/children.py) cancels the runs that the workflow started. The duty finds these runs by the journal of the
#: workflow, so the workflow must not be deleted before that.
LEAVES_NO_RUN = f"""(job.status = 'succeeded' OR NOT EXISTS (
          SELECT 1 FROM journal e JOIN job child ON child.id = e.child_id
          WHERE e.job_id = job.id AND e.kind = 'start' AND e.state = 'open'
            AND {unindexed("child.finished_at IS NULL AND child.status <> 'cancel_requested'")}))"""

#: SQL: the end of `job` is reported, or `expires_at` is more than a day ago. `notify` is true until a duty has made the
#: messages about the end and, after a failure, the `on_failure` run. To make them, the duty needs the job's row.
IS_REPORTED = "NOT (job.notify AND job.expires_at > clock_timestamp() - interval '1 day')"

#: SQL: no rate of a concurrency limit counts the admission of `job` any more. A job whose admission still counts must
#: stay, because the admission (a row of `gate_job`) would be deleted with the job.
COUNTS_AT_NO_RATE = f"""NOT EXISTS (
          SELECT 1 FROM gate_job g JOIN gate ON gate.tenant_id = g.tenant_id AND gate.key = g.key
          WHERE g.job_id = job.id AND gate.per_minute IS NOT NULL
            AND {within_minute("g.admitted_at")})"""

# $1: the jobs. The tombstone records why a job is gone (`because`). A job that somebody deleted has `keep_seconds` 0.
# Any other job has expired.
FORGET = f"""
-- job_forget
WITH deleted AS (
    DELETE FROM job WHERE id = ANY($1::uuid[]) AND expires_at < clock_timestamp()
      AND {LEAVES_NO_RUN}
      AND {COUNTS_AT_NO_RATE}
      AND {IS_REPORTED}
    RETURNING id, tenant_id, pipeline, keep_seconds
)
INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because)
SELECT d.id, d.tenant_id, d.pipeline, EXISTS (SELECT 1 FROM run r WHERE r.job_id = d.id),
       CASE WHEN d.keep_seconds = 0 THEN 'deleted' ELSE 'expired' END
FROM deleted d
ON CONFLICT (job_id) DO NOTHING
"""


async def forget(connection: Connection, job_ids: Sequence[UUID]) -> None:
    """Delete the rows of jobs past `expires_at`, and write a tombstone for each. Three sorts of jobs stay, and
    retention tries again later. A workflow that did not succeed stays until the runs that it started are being
    cancelled. A job that a limit's rate still counts stays for a minute at most. A job whose end is not reported yet
    stays for a day at most.
    """
    await connection.execute(FORGET, list(job_ids))


async def forget_tombstones(connection: Connection, hours: int, limit: int = 5000) -> bool:
    """Delete tombstones that are older than `hours`. Returns whether more such tombstones may be left."""
    status = await connection.execute(
        "DELETE FROM tombstone WHERE job_id IN (SELECT job_id FROM tombstone"
        " WHERE at < statement_timestamp() - make_interval(hours => $1) ORDER BY at LIMIT $2)",
        hours,
        limit,
    )
    return row_count(status) >= limit
