"""Reads the events of jobs, for the API. Each read is one statement, so it takes one round trip and sees one snapshot.

Every query names the tenant. Exception: the query of `last_event_numbers`, whose callers have already checked the
tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from leasehold.db.database import Connection


@dataclass(frozen=True, slots=True)
class EventView:
    """An event of a job. `seq`: the event's number in the job. `job_status`, `task_status`: as the event left them."""

    seq: int
    at: datetime
    kind: str
    job_status: str
    step: str | None
    task_status: str | None
    data: Mapping[str, Any] | None


LAST_EVENT_NUMBERS = """
-- job_event_numbers
SELECT j.id, j.event_seq FROM job j WHERE j.id = ANY($1::uuid[])
"""

# The view `history` has all events of a job (history.py). $1: the job. $2: the tenant. $3: the number of the last event
# that the caller has. $4: read at most this many events.
EVENTS_AFTER = """
-- events_after
SELECT e.seq, e.at, e.kind, e.job_status, e.step, e.task_status, e.data
FROM history e
WHERE e.job_id = $1 AND e.tenant_id = $2 AND e.seq > $3
ORDER BY e.seq LIMIT $4
"""


async def last_event_numbers(connection: Connection, job_ids: Iterable[UUID]) -> dict[UUID, int]:
    """For each job, the number of its last event, which rises with each change of the job. Deleted jobs are absent.

    The query names no tenant, because each caller has already found its job through a row of its own tenant.
    """
    rows = await connection.fetch(LAST_EVENT_NUMBERS, list(job_ids))
    return {row["id"]: row["event_seq"] for row in rows}


async def events_after(connection: Connection, tenant_id: str, job_id: UUID, after: int, limit: int) -> list[EventView]:
    """Read at most `limit` of the job's events numbered above `after`, oldest first."""
    rows = await connection.fetch(EVENTS_AFTER, job_id, tenant_id, after, limit)
    return [EventView(*row) for row in rows]
