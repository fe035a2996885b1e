"""Moves the deadline of a job. No state changes."""

from __future__ import annotations

from datetime import datetime, timedelta
from uuid import UUID

from leasehold.db.database import Connection

# $1: the job. $2: the new deadline is at least this far from now.
_EXTEND = """
-- extend_deadline
UPDATE job SET deadline_at = greatest(deadline_at, clock_timestamp() + $2::interval)
WHERE id = $1 AND deadline_at IS NOT NULL AND finished_at IS NULL
"""

# $1: the job. $2: its new deadline.
_SET = """
-- set_deadline
UPDATE job SET deadline_at = $2 WHERE id = $1
"""


async def set_deadline(connection: Connection, job_id: UUID, deadline: datetime) -> None:
    """Give an unfinished job this deadline, even if it had an earlier or a later deadline, or none. The caller has
    locked the job.
    """
    await connection.execute(_SET, job_id, deadline)


async def extend_deadline(connection: Connection, job_id: UUID, at_least: timedelta) -> None:
    """Move the deadline of an unfinished job to `at_least` from now. A deadline that is later stays as it is, and a job
    without a deadline gets none.
    """
    await connection.execute(_EXTEND, job_id, at_least)
