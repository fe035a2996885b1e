"""`wake_known`: a worker makes the tasks due whose code it has, and that waited because no worker had their code.

A worker that lacks a task's code puts the task off, and records it in `unknown_task` (settlements.snoozing). Each time
adds two events to the job's history. So the task is put off for long, and a worker that gets its code wakes it.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from leasehold.db.database import Connection, unindexed

# $1 the worker, $2 the queues that it serves, $3 its handlers, $4 the most tasks. Each statement that writes a row of
# `unknown_task` holds the lock of its task: so this one locks the task first. It passes over a locked task, which the
# next turn finds. A worker that drains would take no task that it wakes.
WAKE_KNOWN = f"""
-- wake_known
WITH known AS MATERIALIZED (
    SELECT u.task_id, u.epoch FROM unknown_task u JOIN task t ON t.id = u.task_id
    WHERE u.queue = ANY($2::text[]) AND u.handler = ANY($3::text[])
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = $1 AND w.draining)
    LIMIT $4
    FOR UPDATE OF t SKIP LOCKED
), forgotten AS (
    DELETE FROM unknown_task u USING known WHERE u.task_id = known.task_id AND u.epoch = known.epoch
), woken AS (
    -- Another epoch: a worker has claimed the task since.
    UPDATE task t SET available_at = clock_timestamp()
    FROM known
    WHERE t.id = known.task_id AND t.epoch = known.epoch AND {unindexed("t.status = 'waiting'")}
)
SELECT count(*) FROM known
"""


async def wake_known(
    connection: Connection, worker: UUID, queues: Collection[str], handlers: Collection[str], at_most: int
) -> int:
    """waiting -> waiting, due now: the tasks of these queues that these handlers do, and that no worker knew. Polls
    find them. Returns the number of tasks that were looked at: if it is `at_most`, there may be more.
    """
    count: int = await connection.fetchval(WAKE_KNOWN, worker, list(queues), list(handlers), at_most)
    return count
