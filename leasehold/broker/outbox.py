"""The outbox has the hints (messages that tell workers of due tasks) that a transaction has committed, until the broker
has confirmed them. The process that committed the hints publishes them immediately. The relay (a loop of each worker)
publishes the hints that this process did not publish.

If a submission has one hint, the hint has a row of `outbox`. If it has several hints, all of them have one row of
`outbox_batch` (a batch), which is deleted once the broker has confirmed all its hints. If hints stay unconfirmed too
long, the relay turns the batch into rows of `outbox`.

The order of the hints does not matter, and duplicates do no harm. So the relay does not record how far it has come. It
takes rows by time, publishes their hints, and deletes the rows once the broker has confirmed the hints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from uuid import UUID

from leasehold.broker.base import Hint
from leasehold.db.database import Connection, unindexed, window_interval

#: SQL: the column `relay_at` of a new row of `outbox` or `outbox_batch`. The process that commits the row publishes its
#: hints after the commit. If the row still exists a second later, the relay publishes the hints, because the process
#: may have died.
RELAY_AT = "clock_timestamp() + interval '1 second'"
#: The key of the tenant in a job's `trace`, and in the headers of the job's outbox rows.
TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class HintBatch:
    """A row of `outbox_batch`. `unconfirmed`: the tasks whose hints the broker has not confirmed."""

    id: int
    unconfirmed: set[UUID]

    @classmethod
    def of(cls, rows: Sequence[Any]) -> Self | None:
        """The batch of a submission; None for fewer than two hints. `rows`: one row for each hint."""
        if not rows or rows[0]["batch_id"] is None:
            return None
        return cls(rows[0]["batch_id"], {row["task_id"] for row in rows})


@dataclass(frozen=True, slots=True)
class Announcement:
    """A hint to publish. `outbox_id`: the hint's row in `outbox`, or None. `batch`: the batch that contains the hint,
    or None.
    """

    outbox_id: int | None
    hint: Hint
    batch: HintBatch | None = None

    @classmethod
    def from_row(cls, row: Any, batch: HintBatch | None = None) -> Announcement:
        # If the headers are not a JSON object, the hint is sent without headers.
        headers = row["headers"] if isinstance(row["headers"], dict) else {}
        tenant = headers.pop(TENANT, "")
        tenant = tenant if isinstance(tenant, str) else ""
        return cls(row["outbox_id"], Hint(row["task_id"], row["queue"], row["priority"], headers, tenant), batch)


# Take due rows. The statement finds the rows by an array of ids, and not by a join. The planner would begin a join by
# reading the whole table, because its statistics show an almost empty outbox. But the table may still contain many
# deleted rows that no vacuum has removed yet. $1: the most rows to take. $2: the statement takes only rows whose
# `relay_at` is at most this long ago.
TAKE = """
-- relay_take
UPDATE outbox o SET relay_at = clock_timestamp() + interval '10 seconds'
WHERE o.id = ANY(ARRAY(
    SELECT id FROM outbox WHERE relay_at BETWEEN statement_timestamp() - $2::interval AND statement_timestamp()
    ORDER BY relay_at LIMIT $1 FOR UPDATE SKIP LOCKED
))
RETURNING o.id AS outbox_id, o.task_id, o.queue, o.priority, o.headers
"""

# Turn due rows of `outbox_batch` into rows of `outbox`, which are due at once. A task that a worker has already claimed
# gets no row. If the task becomes runnable again, a new hint is written, or a poll finds the task. The ids are an
# array, as in TAKE. $1 and $2 are those of TAKE.
SPLIT = f"""
-- relay_split
WITH taken_batch AS MATERIALIZED (
    DELETE FROM outbox_batch b
    WHERE b.id = ANY(ARRAY(
        SELECT id FROM outbox_batch
        WHERE relay_at BETWEEN statement_timestamp() - $2::interval AND statement_timestamp()
        ORDER BY relay_at LIMIT $1 FOR UPDATE SKIP LOCKED
    ))
    RETURNING b.task_ids, b.created_at
), new_hint AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, created_at, relay_at)
    SELECT t.id, t.job_id, t.queue, t.priority, j.trace, taken_batch.created_at, clock_timestamp()
    FROM taken_batch CROSS JOIN unnest(taken_batch.task_ids) AS batch_task(id) JOIN task t ON t.id = batch_task.id
    JOIN job j ON j.id = t.job_id
    WHERE {unindexed("t.status = 'pending'")}
)
SELECT count(*)::int FROM taken_batch
"""

# The beginning of the statements that delete rows of `outbox` or of `outbox_batch`. The commits do not wait for the
# disk. If PostgreSQL crashes and loses a delete, the relay only publishes the hints again.
_WITH_ASYNCHRONOUS_COMMIT = """
WITH asynchronous_commit AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
)
"""
# Deletes rows of `outbox`. $1: their ids.
ANNOUNCED = f"""
-- announced{_WITH_ASYNCHRONOUS_COMMIT}DELETE FROM outbox o USING asynchronous_commit
WHERE o.id = ANY($1::bigint[])
"""
# Deletes rows of `outbox_batch`. $1: their ids.
BATCHES_ANNOUNCED = f"""
-- batches_announced{_WITH_ASYNCHRONOUS_COMMIT}DELETE FROM outbox_batch o USING asynchronous_commit
WHERE o.id = ANY($1::bigint[])
"""


async def take(connection: Connection, limit: int, back: float | None = None) -> list[Announcement]:
    """Take up to `limit` announcements that were not published in time. The taken rows are due again in ten seconds,
    unless `delete_confirmed` or `drop` deletes them, or `put_off` sets another time. `back`: take only rows that became
    due in the last `back` seconds; None: all rows.
    """
    rows = await connection.fetch(TAKE, limit, window_interval(back))
    return [Announcement.from_row(row) for row in rows]


async def split(connection: Connection, limit: int, back: float | None = None) -> int:
    """Turn up to `limit` batches that were not published in time into rows of `outbox`. Returns the number of these
    batches. `back`: take only batches that became due in the last `back` seconds; None: all batches.
    """
    batches: int = await connection.fetchval(SPLIT, limit, window_interval(back))
    return batches


async def delete_confirmed(connection: Connection, announcements: Sequence[Announcement]) -> None:
    """Delete the rows of hints that the broker confirmed. A batch is deleted when all its hints are confirmed. Raises
    RuntimeError inside a transaction, because the commit of the whole transaction would then not wait for the disk.
    """
    if connection.is_in_transaction():
        raise RuntimeError("call `delete_confirmed` outside of a transaction")
    outbox_ids: list[int] = []
    batch_ids: set[int] = set()
    for announcement in announcements:
        if announcement.outbox_id is not None:
            outbox_ids.append(announcement.outbox_id)
        if (batch := announcement.batch) is not None:
            batch.unconfirmed.discard(announcement.hint.task_id)
            if not batch.unconfirmed:
                batch_ids.add(batch.id)
    if outbox_ids:
        await connection.execute(ANNOUNCED, outbox_ids)
    if batch_ids:
        await connection.execute(BATCHES_ANNOUNCED, sorted(batch_ids))


async def put_off(connection: Connection, outbox_id: int, duty: str) -> None:
    """Postpone a hint that cannot be sent, until the time `retry_at` in the hint's row of `quarantine`. `duty`: the
    loop that quarantined the hint (set it aside after an error).
    """
    await connection.execute(
        "UPDATE outbox o SET relay_at = q.retry_at FROM quarantine q"
        " WHERE o.id = $1 AND q.duty = $2 AND q.unit = o.id::text",
        outbox_id,
        duty,
    )


async def drop(connection: Connection, outbox_id: int) -> None:
    """Delete a hint that cannot be sent. A poll will find the hint's task."""
    await connection.execute("DELETE FROM outbox WHERE id = $1", outbox_id)
