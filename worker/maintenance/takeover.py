"""Decides which worker leads, and carries out the leader's most urgent duty: to make the tasks of dead workers runnable
within a second.

Some duties (maintenance loops of the workers, duties.py) need only one worker at a time. The leader is the worker that
carries out these duties.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from uuid import UUID

import structlog

from leasehold.broker.announcer import Announcer
from leasehold.db.database import Connection, Pool
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.runtime.duty_cycle import Pauses
from leasehold.settings import Settings
from leasehold.transitions import sweeps, workers
from leasehold.worker import metrics

log = structlog.get_logger(__name__)

#: The leader reads expired leases every `sweep_seconds`. If these queries would take more than MAX_BUSY of the leader's
#: time (one hundredth), the leader reads less often, but at least once in LATEST_SECONDS.
MAX_BUSY = 1 / 100
LATEST_SECONDS = 8.0
#: After a worker has died, the leader reads expired leases at every turn for this many seconds. Some rows may still be
#: locked, and other workers may have died at the same time.
_HURRY_SECONDS = 5.0
#: The most leases that one turn ends. After a full turn the next turn follows immediately.
_LEASES_AT_ONCE = 200


class Leadership:
    """The object is true while this worker leads. For a moment two workers may lead at the same time. Then a duty is
    done twice, which does no harm. `seconds`: how long the leadership lasts without a renewal.
    """

    def __init__(self, worker: UUID, seconds: float) -> None:
        self._worker = worker
        self._seconds = seconds
        self._until = float("-inf")  # when the leadership ends without a renewal

    def __bool__(self) -> bool:
        return monotonic() < self._until

    async def renew(self, connection: Connection) -> bool:
        """Take or keep the leadership. Returns whether this worker leads."""
        began = monotonic()
        # "sweeper" is the name of this leadership in the database.
        leads = await workers.lead(connection, "sweeper", self._worker, self._seconds)
        self._until = began + self._seconds if leads else float("-inf")
        return leads


class Takeover:
    """Frees the tasks of dead workers. Its turns wait for the database only: no store or broker can delay them."""

    def __init__(self, settings: Settings, pool: Pool, leadership: Leadership, announcer: Announcer) -> None:
        self._settings = settings
        self._pool = pool
        self._leadership = leadership
        self._announcer = announcer
        #: The workers that were dead at the last turn. duties.py also reads this attribute.
        self.dead: tuple[UUID, ...] = ()
        self._hurry_until = 0.0  # until then, every turn reads expired leases
        # Decides when the next query for expired leases is due.
        self._pauses = Pauses(share=MAX_BUSY, at_least=settings.sweep_seconds, at_most=LATEST_SECONDS)

    async def turn(self) -> float | None:
        """Renew the leadership. If this worker leads, end the leases that have expired or whose owners are dead.
        Returns 0 if more leases may have expired, so that the next turn comes immediately. Otherwise returns None,
        which means the usual pause.
        """
        async with self._pool.acquire() as connection:
            if await self._leadership.renew(connection) and await self._expire_leases(connection):
                self._pauses.forget()
                return 0.0
        return None

    async def _expire_leases(self, connection: Connection) -> bool:
        """End expired leases. The query is slow, because it reads every row version of running tasks since the last
        vacuum. So send it only when the pause is over, or when a worker has died within the last `_HURRY_SECONDS`.
        Returns whether more leases may have expired.
        """
        dead = await workers.dead(connection) if self._settings.presence else []
        if not set(self.dead).issuperset(dead):  # a worker has died since the last turn
            self._hurry_until = monotonic() + _HURRY_SECONDS
        self.dead = tuple(dead)
        if self._pauses.due or monotonic() < self._hurry_until:
            began = monotonic()
            lease_count = await self._expire(connection, dead)
            self._pauses.done(began)
            return lease_count >= _LEASES_AT_ONCE
        return False

    async def _expire(self, connection: Connection, dead: Sequence[UUID]) -> int:
        """End the expired leases, and the leases of the `dead` workers. Returns how many leases ended."""
        lease_count, hints, failed_jobs = await sweeps.expire_leases(
            connection, dead, self._settings.max_losses, _LEASES_AT_ONCE
        )
        count_ended_jobs(failed_jobs)
        if lease_count:
            log.warning("leases of dead workers ended", leases=lease_count, workers=[str(owner) for owner in dead])
            metrics.EXPIRED.inc(lease_count)
            self._announcer.announce(hints)
        return lease_count
