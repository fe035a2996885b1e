"""The outbox: hints that a commit wrote. The process that committed publishes them immediately; the relay sends the
rest.

Order and duplicates do not matter, so the relay needs no cursor: it takes rows by time, publishes them, and deletes
them once the broker has confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leasehold.broker.base import Hint
from leasehold.db.database import Connection, window_interval

#: The key of the tenant in a job's `trace`, and in the headers of the job's outbox rows.
TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Announcement:
    """A row of the outbox, with its hint."""

    outbox_id: int
    hint: Hint

    @classmethod
    def from_row(cls, row: Any) -> Announcement:
        # Headers of another type are not sent.
        headers = row["headers"] if isinstance(row["headers"], dict) else {}
        tenant = headers.pop(TENANT, "")
        tenant = tenant if isinstance(tenant, str) else ""
        return cls(row["outbox_id"], Hint(row["task_id"], row["queue"], row["priority"], headers, tenant))


# Take due rows. The ids are an array and not a join: the planner would begin the join by reading the whole table,
# because its statistics say that the outbox is almost empty. Yet the table may still contain many rows that were
# deleted since the last vacuum.
TAKE = """
-- relay_take
UPDATE outbox o SET relay_at = clock_timestamp() + interval '10 seconds'
WHERE o.id = ANY(ARRAY(
    SELECT id FROM outbox WHERE relay_at BETWEEN statement_timestamp() - $2::interval AND statement_timestamp()
    ORDER BY relay_at LIMIT $1 FOR UPDATE SKIP LOCKED
))
RETURNING o.id AS outbox_id, o.task_id, o.queue, o.priority, o.headers
"""

# Delete rows. The commit does not wait for the disk. If PostgreSQL crashes and loses the delete, the relay only
# publishes the hints once more.
ANNOUNCED = """
-- announced
WITH asynchronous AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
)
DELETE FROM outbox o USING asynchronous WHERE o.id = ANY($1::bigint[])
"""


async def take(connection: Connection, limit: int, back: float | None = None) -> list[Announcement]:
    """Take up to `limit` announcements that were not published in time. They are due again in ten seconds, unless
    `announced` deletes them. `back`: only rows that became due in the last `back` seconds; None: all rows.
    """
    rows = await connection.fetch(TAKE, limit, window_interval(back))
    return [Announcement.from_row(row) for row in rows]


async def announced(connection: Connection, outbox_ids: Sequence[int]) -> None:
    """Delete the rows of hints that the broker confirmed. Raises RuntimeError inside a transaction, because the commit
    of the whole transaction would then not wait for the disk.
    """
    if connection.is_in_transaction():
        raise RuntimeError("call `announced` outside of a transaction")
    await connection.execute(ANNOUNCED, list(outbox_ids))


async def drop(connection: Connection, outbox_id: int) -> None:
    """Delete a hint that cannot be sent. A poll finds its task."""
    await connection.execute("DELETE FROM outbox WHERE id = $1", outbox_id)
