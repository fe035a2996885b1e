"""What a running step wants its next attempt to know, whatever happens to this one. No state changes here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leasehold.db.database import Connection
from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease

# The task's row is locked while the note is written: a claim that takes the task over either waits for the note and
# sees it, or came first, and then nothing is written.
REMEMBER = """
-- note
WITH mine AS MATERIALIZED (
    SELECT t.id FROM task t
    WHERE t.id = $1 AND t.lease_owner = $2 AND t.epoch = $3 AND t.status = 'running'
    FOR SHARE
)
INSERT INTO note (task_id, value) SELECT id, $4::jsonb FROM mine
ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
RETURNING task_id
"""


async def remember(connection: Connection, lease: Lease, note: Mapping[str, Any]) -> None:
    """Keep `note` for the task's next attempt. Raises LeaseLost, and then nothing is written."""
    kept = await connection.fetchval(REMEMBER, lease.task_id, lease.owner, lease.epoch, dict(note))
    if kept is None:
        raise LeaseLost
