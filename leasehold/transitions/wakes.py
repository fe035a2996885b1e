"""Makes a snoozing step due now, because of an outside event (a callback, a message)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection, unindexed

# $1 the job, $2 its tenant, $3 the name of the step. A step for external workers (queue `ext:`) is not woken.
WAKE = f"""
-- wake
WITH woken AS (
    UPDATE task t SET available_at = clock_timestamp()
    FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND {unindexed("j.finished_at IS NULL")}
      AND t.job_id = j.id AND t.step = $3 AND NOT starts_with(t.queue, 'ext:')
      AND t.epoch > 0 -- it has run before: a step that has never run waits for its start time
      AND {unindexed("t.status = 'waiting'")}
    RETURNING t.id, t.job_id, t.queue, t.priority, j.trace
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT id, job_id, queue, priority, trace, {RELAY_AT} FROM woken
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


async def wake(connection: Connection, job_id: UUID, tenant_id: str, step: str) -> Sequence[Announcement]:
    """Make the snoozing step of the tenant's job due now. Returns the hint for it (a message that tells workers of the
    due task). If the step does not snooze, nothing changes and no hint is returned.
    """
    return [Announcement.from_row(row) for row in await connection.fetch(WAKE, job_id, tenant_id, step)]
