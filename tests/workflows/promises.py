"""What must hold of a journal (I25): one row a place, written by the epoch that held the lease then."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

from leasehold.db.database import Connection

#: The statement that suspends writes the row and the event: each has a time of its own, and on a busy machine
#: PostgreSQL may stand still between the two.
_ONE_STATEMENT = timedelta(seconds=10)
# A row and the claim of its epoch, and the next event of the workflow's task: the lease ended there, or was taken over.
_OUTSIDE = """
SELECT e.branch, e.number, e.kind, e.state, e.epoch, e.at, claim.at AS claimed_at, (
    SELECT min(later.at) FROM history later
    WHERE later.job_id = e.job_id AND later.task_id = t.id AND later.seq > claim.seq) AS ended_at
FROM journal e
JOIN task t ON t.job_id = e.job_id AND NOT t.contained
LEFT JOIN history claim ON claim.job_id = e.job_id AND claim.task_id = t.id AND claim.epoch = e.epoch
    AND claim.kind IN ('claimed', 'taken_over')
WHERE e.job_id = $1
"""


async def assert_journal(connection: Connection, run_id: UUID) -> None:
    rows = await connection.fetch(_OUTSIDE, run_id)
    assert rows
    for row in rows:
        assert row["claimed_at"] is not None, f"nobody had the epoch of {dict(row)}"
        # A row keeps the time of its call, and gets the epoch of its result: that one may be later.
        has_epoch_of_result = row["kind"] in ("signal", "sleep", "result") or (row["kind"], row["state"]) == (
            "run",
            "failed",
        )
        later = has_epoch_of_result or row["state"] == "cancelled"
        within = later or row["claimed_at"] <= row["at"]
        assert within, f"written before the lease began: {dict(row)}"
        ended_at = row["ended_at"]
        assert ended_at is None or row["at"] <= ended_at + _ONE_STATEMENT, f"written after the lease ended: {dict(row)}"
    assert len({(row["branch"], row["number"]) for row in rows}) == len(rows)
