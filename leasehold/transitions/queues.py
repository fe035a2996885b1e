"""Pauses and resumes queues, when an operator asks for it."""

from __future__ import annotations

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection

# While a queue is paused, workers acknowledge its hints (messages that tell workers of due tasks) without a claim. So
# when the queue is resumed, this statement writes new hints for the first 1000 due tasks, by priority and then by age.
# Polls find the other due tasks. Queues of external workers (`ext:`) get no hints.
_HINT_AGAIN = f"""
-- tell_again
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT t.id, t.job_id, t.queue, t.priority, j.trace, {RELAY_AT}
FROM task t JOIN job j ON j.id = t.job_id
WHERE t.queue = $1 AND t.status IN ('pending', 'retry', 'waiting') AND t.available_at <= statement_timestamp()
  AND NOT starts_with(t.queue, 'ext:')
ORDER BY t.priority, t.available_at LIMIT 1000
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


async def pause(connection: Connection, queue: str, reason: str) -> None:
    """Pause the queue: no worker claims its tasks from now on."""
    await connection.execute(
        "INSERT INTO paused_queue (queue, reason) VALUES ($1, $2)"
        " ON CONFLICT (queue) DO UPDATE SET reason = excluded.reason",
        queue,
        reason,
    )


async def resume(connection: Connection, queue: str) -> list[Announcement]:
    """Resume the queue: workers claim its tasks again. Returns the new hints, which the caller publishes."""
    async with connection.transaction():
        if not await connection.fetchval("DELETE FROM paused_queue WHERE queue = $1 RETURNING true", queue):
            return []
        return [Announcement.from_row(row) for row in await connection.fetch(_HINT_AGAIN, queue)]
