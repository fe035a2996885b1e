"""Commits the calls of a running workflow to its journal (`record`). The workflow keeps its lease and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection
from leasehold.transitions.settlements.guard import HELD_IN_CANCELLED_JOB, HELD_IN_LIVE_JOB, lease_columns
from leasehold.transitions.workflows.journal_sql import write_calls
from leasehold.transitions.workflows.records import Recorded, Recording, calls_column


def _record(name: str, held: str) -> str:
    """SQL: the statement `name`. The parameter `held` is the SQL of several CTEs of settlements.guard. One of them,
    `lease_batch`, has the leases. Another, which is also named `held`, has the leases that are still valid.
    `write_calls` adds the CTE `steps`, the tasks that the calls start.

    The result has a row for each lease, and after them a row for each hint (a message that tells workers of a due
    task). If the caller has not published a hint within a second (`relay_at`), the relay does so.
    """
    return f"""-- {name}
WITH {held}{write_calls(claims=False)}, reset_counters AS (
    -- The workflow has made progress: earlier errors and losses (attempts whose worker was lost) no longer count.
    -- `journaled`: the workflow has called something.
    UPDATE task t SET losses = 0, errors = 0, journaled = true
    FROM held WHERE t.id = held.id AND (t.losses + t.errors > 0 OR NOT t.journaled)
), advanced_jobs AS (
    UPDATE job j SET steps_left = j.steps_left + per_job.step_count
    FROM (SELECT job_id, count(*)::int AS step_count FROM steps GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.trace
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT s.id, s.job_id, s.queue, s.priority, a.trace, {RELAY_AT}
    FROM steps s JOIN advanced_jobs a ON a.id = s.job_id
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, held.id IS NOT NULL AS committed,
       coalesce(jobs.status = 'cancel_requested', false) AS cancelling,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN held ON held.id = a.id LEFT JOIN task t ON t.id = a.id LEFT JOIN jobs ON jobs.id = t.job_id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hints h
"""


# This statement is for a workflow that has not seen a cancel of its job.
RECORD = _record("record_calls", HELD_IN_LIVE_JOB)
# This statement is for a workflow that has seen the cancel of its job. It records the place where the workflow saw the
# cancel, and the calls that undo its work.
RECORD_CANCELLING = _record("record_calls_of_cancelled", HELD_IN_CANCELLED_JOB)


async def record(
    connection: Connection, recordings: Sequence[Recording]
) -> tuple[dict[UUID, Recorded], list[Announcement]]:
    """running -> running: write the calls of each lease that is valid, with the steps that they start. Safe to repeat.

    In a job that is being cancelled, nothing is written for a workflow that has not seen the cancel. A workflow has
    seen the cancel when Cancelled was raised in its code (`Recording.has_seen_cancel`).

    Returns task -> the outcome of its Recording, and the hints of the steps. The caller publishes the hints after the
    commit.
    """
    answers, hints = {}, []
    for has_seen_cancel, statement in ((False, RECORD), (True, RECORD_CANCELLING)):
        batch = [recording for recording in recordings if recording.has_seen_cancel is has_seen_cancel]
        if not batch:
            continue
        leases = lease_columns([recording.lease for recording in batch])
        for row in await connection.fetch(statement, *leases, calls_column([recording.calls for recording in batch])):
            if row["outbox_id"] is not None:
                hints.append(Announcement.from_row(row))
            else:
                answers[row["task_id"]] = Recorded(row["committed"], row["cancelling"])
    return answers, hints
