"""`wake_known` makes due the tasks that another worker has snoozed because that worker lacked their code.

A worker that claims a task and lacks its code snoozes the task, and records it in `unknown_task`
(settlements.snoozing). Each claim with its snooze adds two events to the job's history, so the snooze is long. A worker
that has the code makes the task due before the snooze is over.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from leasehold.broker.base import Hint
from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection, unindexed

# $1 the worker, $2 the queues that it serves, $3 its handlers. The statement wakes at most $4 tasks. If a task needs
# several handlers, the column `handler` names all of them, as in `a.b, c.d` (missing_code.py). Only a worker that has
# all of them wakes the task. Each statement that writes a row of `unknown_task` holds the lock of its task, so this
# statement locks the task first. The statement passes over a task that another transaction has locked, and the next
# call finds that task. A worker that drains (is about to end) wakes no task, because it could not claim the task.
# `unindexed` keeps PostgreSQL from reading a partial index for the condition, because the statement finds the task by
# its id.
WAKE_KNOWN = f"""
-- wake_known
WITH known_task AS MATERIALIZED (
    SELECT u.task_id, u.epoch, t.job_id FROM unknown_task u JOIN task t ON t.id = u.task_id
    WHERE u.queue = ANY($2::text[])
      AND (u.handler = ANY($3::text[])
           OR (u.handler LIKE '%, %' AND string_to_array(u.handler, ', ') <@ $3::text[]))
      AND NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = $1 AND w.draining)
    LIMIT $4
    FOR UPDATE OF t SKIP LOCKED
), forgotten_rows AS (
    DELETE FROM unknown_task u USING known_task k WHERE u.task_id = k.task_id AND u.epoch = k.epoch
), woken_task AS (
    -- If the epoch differs, a worker has claimed the task since.
    UPDATE task t SET available_at = clock_timestamp()
    FROM known_task k JOIN job j ON j.id = k.job_id
    WHERE t.id = k.task_id AND t.epoch = k.epoch AND {unindexed("t.status = 'waiting'")}
    RETURNING t.id, t.queue, t.priority, j.trace
)
SELECT w.id AS task_id, w.queue, w.priority, w.trace AS headers, NULL AS outbox_id
FROM known_task k LEFT JOIN woken_task w ON w.id = k.task_id
"""


async def wake_known(
    connection: Connection, worker: UUID, queues: Collection[str], handlers: Collection[str], at_most: int
) -> tuple[list[Hint], bool]:
    """Make due now the tasks that were snoozed for lack of their code, if they wait in one of `queues`, and all their
    handlers are among `handlers`. Their status stays `waiting`. Returns their hints (messages that a task is due), and
    whether there may be more such tasks. The outbox does not have these hints, because only the calling worker uses
    them. If a hint is lost, a poll finds the task.
    """
    rows = await connection.fetch(WAKE_KNOWN, worker, list(queues), list(handlers), at_most)
    hints = [Announcement.from_row(row).hint for row in rows if row["task_id"] is not None]
    return hints, len(rows) == at_most
