"""Debounces runs (`merge`): a run that has not started yet takes the arguments of a later submission, and starts
later. If a worker claims a run for which it has no room or no code, it puts the run off (gives it back). Such a claim
does not count as a start.

A debounced run has a dedupe key. No two unfinished runs of a template have the same dedupe key. When a submission finds
that the run with its key has started, that run loses the key, and the submission becomes a new run.

A client whose answer was lost repeats its submission with the same id. The repetition must not replace newer arguments
of the run. If the run has started, the repetition must not become a second run. So `merge` records, in the table
`idempotency` and under the id of each submission, which run took its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.db.idempotency import KEEP


def _lock_sql(name: str, keys: str) -> str:
    """A statement that locks dedupe keys of the tenant $1. `keys`: the SQL of these keys, as rows `a` with `pipeline`
    and `key`. Another transaction that submits one of these keys, or retries a run that has one of them, waits at this
    statement until the first transaction ends.
    """
    return f"""
-- {name}
SELECT pg_advisory_xact_lock(hashed.key) FROM (
    SELECT DISTINCT hashtextextended($1::text || '/' || a.pipeline || '/' || a.key, 0) AS key
    FROM {keys} ORDER BY 1
) AS hashed
"""


# $1 the tenant, $2 the submissions, as JSON records.
_LOCK_KEYS = _lock_sql("debounce_lock", "jsonb_to_recordset($2::jsonb) AS a(pipeline text, key text)")

# $1 the tenant, $2 the ids of the jobs whose dedupe keys the statement locks.
_LOCK_KEYS_OF_JOBS = _lock_sql(
    "debounce_lock_jobs",
    """(
        SELECT j.pipeline, j.dedupe_key AS key FROM job j
        WHERE j.id = ANY($2::uuid[]) AND j.tenant_id = $1 AND j.dedupe_key IS NOT NULL
    ) AS a""",
)

# SQL: the key of the submission `a` in the table `idempotency`. It begins with a space, because no client's key begins
# with a space.
_REMEMBERED_AS = "' debounced ' || a.id::text"

# $1 the tenant, $2 the submissions. Returns the submissions that an earlier transaction has written, with the run of
# each: the run that it became, or the run that took its arguments.
_WRITTEN_EARLIER = f"""
-- debounce_written_earlier
SELECT a.nth, coalesce(j.id, convert_from(i.body, 'UTF8')::uuid) AS run_id
FROM jsonb_to_recordset($2::jsonb) AS a(id uuid, pipeline text, nth int)
LEFT JOIN job j ON j.id = a.id AND j.tenant_id = $1 AND j.pipeline = a.pipeline
LEFT JOIN idempotency i ON i.tenant_id = $1 AND i.key = {_REMEMBERED_AS} AND i.expires_at > clock_timestamp()
WHERE j.id IS NOT NULL OR i.key IS NOT NULL
"""

# SQL: no code of the task `t` has run, because each worker that claimed the task has put it off. The worker lacked the
# code, or a place to run it, such as a thread or a child process (`put_off` in settlements/snoozing.py). A claimed job
# with concurrency limits counts as started, because the limits have admitted it with its present arguments.
_ONLY_PUT_OFF = """(t.epoch = (SELECT count(*) FROM history e
                          WHERE e.job_id = t.job_id AND e.task_id = t.id AND e.data ? 'put_off')
         AND NOT EXISTS (SELECT 1 FROM gate_job g WHERE g.job_id = t.job_id))"""

# $1 the tenant, $2 the submissions, $3 how long `remembered` keeps its rows.
# - `waiting_jobs` locks the unfinished jobs with these keys by ascending id. All statements lock jobs in this order, so
#   they do not deadlock.
# - `postponed_tasks` leaves out a task that a worker has claimed meanwhile, because the task's epoch has grown, and an
#   UPDATE checks its conditions on the newest version of the row.
# - `known_again` deletes the task's row of `unknown_task`. With this row, a worker that has the code would make the
#   task due before its new start.
# - `at_limits` postpones the admission of a job that waits at its concurrency limits (has rows in `gate_job`) to the
#   new start.
# - `unindexed`: PostgreSQL uses no partial index for the condition.
MERGE = f"""
-- debounce
WITH submissions AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset($2::jsonb)
        AS a(id uuid, pipeline text, key text, params jsonb, delay float8, nth int)
), waiting_jobs AS MATERIALIZED (
    SELECT j.id, a.params, a.delay, a.nth
    FROM submissions a JOIN job j ON j.tenant_id = $1 AND j.pipeline = a.pipeline AND j.dedupe_key = a.key
    WHERE {unindexed("j.finished_at IS NULL")}
    ORDER BY j.id
    FOR UPDATE OF j
), postponed_tasks AS (
    UPDATE task t SET available_at = clock_timestamp() + make_interval(secs => w.delay)
    FROM waiting_jobs w
    WHERE t.job_id = w.id AND {unindexed("t.status IN ('waiting', 'blocked')")}
      AND CASE t.epoch WHEN 0 THEN true ELSE {_ONLY_PUT_OFF} END
    RETURNING t.id, t.job_id, t.available_at
), known_again AS (
    DELETE FROM unknown_task u USING postponed_tasks p WHERE u.task_id = p.id
), at_limits AS (
    UPDATE gate_job g SET ready_at = p.available_at FROM postponed_tasks p
    WHERE g.job_id = p.job_id AND g.admitted_at IS NULL
), runs AS (
    UPDATE run r SET scheduled_at = p.available_at FROM postponed_tasks p WHERE r.job_id = p.job_id
), jobs AS (
    -- The job's time limit begins when the job may start. While a job is `held` (waits at its concurrency limits), its
    -- time limit is `start_within_seconds`. A job that has started loses its dedupe key.
    UPDATE job j
    SET params = CASE WHEN p.job_id IS NULL THEN j.params ELSE w.params END,
        dedupe_key = CASE WHEN p.job_id IS NULL THEN NULL ELSE j.dedupe_key END,
        deadline_at = CASE WHEN p.job_id IS NULL THEN j.deadline_at
                           ELSE p.available_at + make_interval(secs => CASE WHEN j.held THEN j.start_within_seconds
                                                                            ELSE j.timeout_seconds END) END
    FROM waiting_jobs w LEFT JOIN postponed_tasks p ON p.job_id = w.id
    WHERE j.id = w.id
    RETURNING j.id, w.nth, p.job_id IS NOT NULL AS is_postponed
), remembered AS (
    INSERT INTO idempotency (tenant_id, key, request_hash, status_code, body, locked_until, expires_at)
    SELECT $1, {_REMEMBERED_AS}, '', 202, convert_to(jobs.id::text, 'UTF8'), clock_timestamp(),
           clock_timestamp() + $3::interval
    FROM jobs JOIN submissions a ON a.nth = jobs.nth WHERE jobs.is_postponed
    ON CONFLICT (tenant_id, key) DO NOTHING
)
SELECT id, nth FROM jobs WHERE is_postponed
"""


@dataclass(frozen=True, slots=True)
class Debounced:
    """A submission. A client that repeats it sends the same `id`. The run starts `delay` seconds after the last
    submission with the same `key`.
    """

    id: UUID
    pipeline: str
    key: str
    params: Mapping[str, Any]
    delay: float


async def lock_keys(connection: Connection, tenant_id: str, submissions: Sequence[Debounced]) -> list[dict[str, Any]]:
    """Lock the keys of the submissions until the caller's transaction ends. Returns the submissions as records,
    numbered from 1 (`nth`).
    """
    records = [
        {**asdict(submission), "id": str(submission.id), "nth": nth} for nth, submission in enumerate(submissions, 1)
    ]
    await connection.fetch(_LOCK_KEYS, tenant_id, records)
    return records


async def lock_keys_of_jobs(connection: Connection, tenant_id: str, job_ids: Sequence[UUID]) -> None:
    """Lock the dedupe keys of these failed jobs until the caller's transaction ends. Call this before a retry.
    Otherwise a retried run could take the key between the `merge` of a submission and the write of its run.
    """
    await connection.fetch(_LOCK_KEYS_OF_JOBS, tenant_id, job_ids)


async def written_earlier(
    connection: Connection, tenant_id: str, records: Sequence[Mapping[str, Any]]
) -> dict[int, UUID]:
    """For each submission that an earlier transaction has written: its `nth` -> its run. `records`: as `lock_keys`
    returns them.
    """
    rows = await connection.fetch(_WRITTEN_EARLIER, tenant_id, records)
    return {row["nth"]: row["run_id"] for row in rows}


async def merge(connection: Connection, tenant_id: str, records: Sequence[Mapping[str, Any]]) -> dict[int, UUID]:
    """waiting -> waiting: make the runs that have not started due later, with the arguments of the submissions. (A task
    that its concurrency limits block stays blocked.) `records`: as `lock_keys` returns them, without the submissions
    that `written_earlier` found. No two records may have the same key.

    Returns {`nth` of a submission: the run that took its arguments}. Call this in a transaction. In the same
    transaction, write a new run for each submission that the result leaves out. Until the transaction ends, no other
    transaction can write a run with one of these keys.
    """
    rows = await connection.fetch(MERGE, tenant_id, records, KEEP)
    return {row["nth"]: row["id"] for row in rows}
