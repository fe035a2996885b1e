"""Releases orphans: tasks that this worker owns according to their rows in PostgreSQL, but does not hold.

A task becomes an orphan in two ways. First, an asynchronous failover of PostgreSQL may lose the last commits. If one of
them was a settlement, its task is `running` again, but its owner no longer holds the task. Second, the answer to a
claim may be lost. Then PostgreSQL has given the task to this worker, but the worker does not know it. Without a
release, an orphan would wait until its lease expires. An expired lease counts as a loss of the task
(LEASEHOLD_MAX_LOSSES), but a release does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

#: Seconds between the two queries that must both find a task before `release` releases it. At the first query, the
#: answer to a claim may still be on its way. By the second query, the worker has the answer and holds that task. If a
#: release was wrong nevertheless, the work is done twice, but this does no harm, because writes with the old epoch
#: change nothing.
_CONFIRM_SECONDS = 1.0


class Orphans:
    """Searches for the orphans of one worker. Call `begin_search` after each reconnect, and after a statement whose
    answer was lost. While `is_searching` is true, call `release` from time to time.
    """

    def __init__(self, worker: UUID, lease_seconds: float) -> None:
        self._worker = worker
        self._lease_seconds = lease_seconds
        self._search_began_at: datetime | None = None
        self._suspects: dict[UUID, int] = {}  # task -> epoch: the orphans that the last query found
        self._suspected_at = 0.0

    @property
    def is_searching(self) -> bool:
        # Whether there may still be orphans from before the last call of `begin_search`.
        return self._search_began_at is not None

    async def begin_search(self, connection: Connection) -> None:
        """Begin a search for the tasks that were neither claimed nor renewed after this moment. The moment is
        PostgreSQL's time.
        """
        self._search_began_at = await connection.fetchval("SELECT clock_timestamp()")
        self._suspects, self._suspected_at = {}, monotonic()

    async def release(self, connection: Connection, held: Sequence[UUID]) -> list[JobEnded]:
        """Release the orphans that two queries have found. The first call that finds orphans only remembers them. A
        later call that finds the same orphans releases them, except orphans whose rows another transaction has locked.
        `held`: the tasks that the worker holds, and the tasks of lost leases whose attempts have not stopped yet.
        Returns the jobs that have ended, because a job that is being cancelled ends with the release of its last task.
        """
        assert self._search_began_at is not None
        owned_tasks = await claims.owned_before(connection, self._worker, self._search_began_at, self._lease_seconds)
        if not owned_tasks:
            self._search_began_at = None
            return []
        orphans = {task: epoch for task, epoch in owned_tasks.items() if task not in held}
        if self._suspects != orphans:  # the first query that finds these tasks
            self._suspects, self._suspected_at = orphans, monotonic()
            return []
        if monotonic() - self._suspected_at < _CONFIRM_SECONDS:  # too early for the second query
            return []
        if not orphans:  # the worker holds all these tasks: go on with the search
            return []
        # Tasks with locked rows are left to a later call, because the heartbeat uses this connection, too. If a release
        # waited for a lock, the heartbeat would wait with it. The worker would then renew no lease, and would count as
        # dead.
        released, ended = await release_unlocked(connection, self._worker, orphans)
        if released == owned_tasks:
            self._search_began_at = None  # this release ends the search: no task from before the search remains
        return ended


async def release_unlocked(
    connection: Connection, worker: UUID, tasks: Mapping[UUID, int]
) -> tuple[dict[UUID, int], list[JobEnded]]:
    """Release these tasks as `release_tasks` does, but wait for no lock. A task is left out if another transaction has
    locked its row or its job's row. Returns the tasks that were not left out, and the jobs that have ended.
    """
    async with connection.transaction():
        unlocked_tasks = await claims.lock_unlocked(connection, tasks)
        to_release = {task: epoch for task, epoch in tasks.items() if task in unlocked_tasks}
        return to_release, await release_tasks(connection, worker, to_release) if to_release else []


async def release_tasks(connection: Connection, worker: UUID, tasks: Mapping[UUID, int]) -> list[JobEnded]:
    """Release these tasks, which the worker owns but does not hold. `tasks`: task -> epoch, with at least one task.
    Returns the jobs that have ended, as `Orphans.release` does.
    """
    # A release reads neither `attempt` nor `trusted_until`.
    leases = [Lease(task, worker, epoch, attempt=0, trusted_until=0.0) for task, epoch in tasks.items()]
    outcome = await settlements.release(connection, leases)
    # In a job that is being cancelled, `release` refuses all tasks except workflows that have made a call, because only
    # the code of such a workflow must see the cancel. The refused tasks end here.
    refused_leases = [lease for lease in leases if outcome.verdicts.get(lease.task_id) is not Verdict.SETTLED]
    log.warning("tasks that this worker does not hold were released", tasks=len(leases) - len(refused_leases))
    return (await settlements.acknowledge_cancel(connection, refused_leases)).ended if refused_leases else []
