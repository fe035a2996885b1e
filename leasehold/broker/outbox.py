"""The outbox: hints that a commit wrote. Whoever committed publishes them at once; the relay sends the rest.

Order and duplicates do not matter (they are hints), so there is no cursor: rows are taken by time, published,
and deleted once the broker confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.broker.base import Hint
from leasehold.db.database import Connection, lookback

#: The key of a job's `trace`, and so of each of its outbox rows' headers, under which the hint's tenant stands.
TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Announcement:
    """An outbox row and the hint it stands for."""

    outbox_id: int
    hint: Hint

    @classmethod
    def from_row(cls, row: Any) -> Announcement:
        headers = row["headers"] if isinstance(row["headers"], dict) else {}  # of another shape: sent without
        tenant = headers.pop(TENANT, "")
        whose = tenant if isinstance(tenant, str) else ""
        return cls(row["outbox_id"], Hint(row["task_id"], row["queue"], row["priority"], headers, whose))


# By an array, not a join: where the statistics say that the outbox is empty, as it mostly is, the planner would begin
# with all of it, and so with all that has gone through since the last vacuum.
TAKE = """
-- relay_take
UPDATE outbox o SET relay_at = clock_timestamp() + interval '10 seconds'
WHERE o.id = ANY(ARRAY(
    SELECT id FROM outbox WHERE relay_at BETWEEN statement_timestamp() - $2::interval AND statement_timestamp()
    ORDER BY relay_at LIMIT $1 FOR UPDATE SKIP LOCKED
))
RETURNING o.id AS outbox_id, o.task_id, o.queue, o.priority, o.headers
"""

# The rows go, and jobs that were only written are now announced.
ANNOUNCED = """
-- announced
WITH gone AS (
    DELETE FROM outbox WHERE id = ANY($1::bigint[]) RETURNING job_id
), jobs AS MATERIALIZED (
    SELECT j.id FROM job j WHERE j.id IN (SELECT job_id FROM gone) AND j.status = 'pending' ORDER BY j.id FOR UPDATE
), queued AS (
    UPDATE job j SET status = 'queued', event_seq = j.event_seq + 1
    FROM jobs WHERE j.id = jobs.id
    RETURNING j.id, j.tenant_id, j.event_seq
)
INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
SELECT id, event_seq, tenant_id, 'queued', 'queued' FROM queued
"""


async def take(connection: Connection, limit: int, back: float | None = None) -> list[Announcement]:
    """Rows that nobody published in time; they come again in ten seconds unless `announced` removes them. What has been
    due for more than `back` seconds is not seen; None: everything is.
    """
    rows = await connection.fetch(TAKE, limit, lookback(back))
    return [Announcement.from_row(row) for row in rows]


async def announced(connection: Connection, outbox_ids: Sequence[int]) -> None:
    """The broker confirmed these: forget the rows; job: pending -> queued."""
    await connection.execute(ANNOUNCED, list(outbox_ids))


async def drop(connection: Connection, outbox_id: int) -> None:
    """Forget a hint that cannot be sent. Its task is found by those who look."""
    await connection.execute("DELETE FROM outbox WHERE id = $1", outbox_id)
