"""Gives back, after a reconnect, the tasks that PostgreSQL says this worker runs and it does not hold.

An asynchronous failover loses the last commits. A settlement among them is undone: the task is running again, by a
worker that has finished it and has forgotten it. Nobody would run the task before its lease passes, and it would be
charged a loss. So the worker releases it, which charges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from time import monotonic
from uuid import UUID

import structlog

from leasehold.db.database import Connection
from leasehold.domain.lease import Lease
from leasehold.transitions import claims, settlements
from leasehold.transitions.endings import JobEnded
from leasehold.transitions.settlements import Verdict

log = structlog.get_logger(__name__)

#: Seconds between the two looks that must both find a task. A claim whose answer arrives meanwhile is held by then. A
#: wrong guess costs double work and nothing else: the epoch fences the lease.
_SURE_SECONDS = 1.0


class Orphans:
    """Call `connected` with each new connection, and `give_back` while this is `due`."""

    def __init__(self, worker: UUID, lease_seconds: float) -> None:
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._connected_at: datetime | None = None
        self._found: dict[UUID, int] = {}
        self._found_at = 0.0

    @property
    def due(self) -> bool:
        return self._connected_at is not None

    async def connected(self, connection: Connection) -> None:
        """Record PostgreSQL's time: only tasks that were claimed or renewed before it can be orphans."""
        self._connected_at = await connection.fetchval("SELECT clock_timestamp()")
        self._found, self._found_at = {}, monotonic()

    async def give_back(self, connection: Connection, held: Sequence[UUID]) -> list[JobEnded]:
        """Release what two looks have found. `held`: the tasks that the worker holds, also by a lease that it has lost
        and whose attempt still stops. Returns the jobs that ended, because they are being cancelled.
        """
        assert self._connected_at is not None
        found = await claims.owned_before(connection, self._worker, self._connected_at, self._lease_seconds)
        if not found:
            self._connected_at = None
            return []
        orphans = {task: epoch for task, epoch in found.items() if task not in held}
        if self._found != orphans:
            self._found, self._found_at = orphans, monotonic()
            return []
        if monotonic() - self._found_at < _SURE_SECONDS:
            return []
        if found == orphans:
            self._connected_at = None  # nothing else is left of the time before
        if not orphans:
            return []
        leases = [Lease(task, self._worker, epoch, 0, 0.0) for task, epoch in orphans.items()]
        released = await settlements.release(connection, leases)
        lost = [lease for lease in leases if released.verdicts.get(lease.task_id) is not Verdict.SETTLED]
        log.warning("tasks that this worker does not hold were given back", tasks=len(leases) - len(lost))
        return (await settlements.acknowledge_cancel(connection, lost)).ended if lost else []
