"""Writes the progress that running steps report. Only the holder of a step's lease may report it. A report does not
change the state of the job or the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from leasehold.db.database import Connection, unindexed
from leasehold.domain.lease import Lease
from leasehold.domain.storable import storable_text
from leasehold.domain.work import percent_of

#: A summary is cut after this many characters.
MAX_SUMMARY = 500


@dataclass(frozen=True, slots=True)
class Progress:
    """A report of the step that runs under `lease`. `percent`: 0 to 100. `summary`: a text for people."""

    lease: Lease
    percent: float
    summary: str = ""


# A report of an earlier attempt (a smaller epoch) changes nothing. `unindexed` hides the condition on `status` from
# PostgreSQL's planner. So PostgreSQL finds the tasks by id, and does not read the index of all running tasks.
PROGRESS = f"""
-- progress
INSERT INTO progress (task_id, job_id, epoch, percent, summary)
SELECT t.id, t.job_id, t.epoch, p.percent, p.summary
FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::float8[], $5::text[]) AS p(owner, id, epoch, percent, summary)
JOIN task t ON t.id = p.id AND t.lease_owner = p.owner AND t.epoch = p.epoch AND {unindexed("t.status = 'running'")}
ON CONFLICT (task_id) DO UPDATE
SET epoch = excluded.epoch, percent = excluded.percent, summary = excluded.summary, at = clock_timestamp()
WHERE progress.epoch <= excluded.epoch
RETURNING task_id
"""


async def report(connection: Connection, reports: Sequence[Progress]) -> set[UUID]:
    """Write the reports, at most one for each step. Returns the tasks whose report was written. If a task of the
    reports is not returned, its lease is lost.
    """
    rows = await connection.fetch(
        PROGRESS,
        [progress.lease.owner for progress in reports],
        [progress.lease.task_id for progress in reports],
        [progress.lease.epoch for progress in reports],
        [percent_of(progress.percent) for progress in reports],
        [storable_text(progress.summary[:MAX_SUMMARY]) for progress in reports],
    )
    return {row["task_id"] for row in rows}
