"""Notes: a running step writes a note for its next attempt. The next attempt reads the note even if the attempt that
wrote it is lost. A note changes no state of a job or task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leasehold.db.database import Connection
from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease

# $1 to $3: the task, owner and epoch of the lease. $4: the note. The statement locks the task's row while it writes the
# note, because a claim may take the task over at the same time. If the claim comes later, it waits for the lock, and
# the new attempt has the note. If the claim came first, the statement writes nothing.
REMEMBER = """
-- note
WITH held AS MATERIALIZED (
    SELECT t.id FROM task t
    WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND t.status = 'running'
    FOR SHARE
)
INSERT INTO note (task_id, value) SELECT id, $4::jsonb FROM held
ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
RETURNING task_id
"""


async def remember(connection: Connection, lease: Lease, note: Mapping[str, Any]) -> None:
    """Write `note` for the task's next attempt. If the lease is lost, write nothing and raise LeaseLost."""
    task_id = await connection.fetchval(REMEMBER, lease.task_id, lease.owner, lease.epoch, dict(note))
    if task_id is None:
        raise LeaseLost
