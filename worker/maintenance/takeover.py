"""Leading, and what the leader must never be late with: steps of lost workers become runnable within a second."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from uuid import UUID

import structlog

from leasehold.broker.announcer import Announcer
from leasehold.db.database import Connection, Pool
from leasehold.exporter.jobs import jobs_ended
from leasehold.runtime.duty_cycle import Pauses
from leasehold.settings import Settings
from leasehold.transitions import sweeps, workers
from leasehold.worker import metrics

log = structlog.get_logger(__name__)

#: Leases that pass are looked for every `sweep_seconds`, but for at most this share of the time, and at the latest
#: after so many seconds.
MOST_BUSY = 1 / 100
LATEST_SECONDS = 8.0
#: For so long after a worker was missed they are looked for at every turn: some may be locked, or more than one ends.
_HURRY_SECONDS = 5.0


class Leadership:
    """Whether this worker is the one that does what time asks for. Its duties are safe to run twice: the lease keeps
    them from being done twice, and nothing hangs on it.
    """

    def __init__(self, worker: UUID, seconds: float) -> None:
        self._worker = worker
        self._seconds = seconds
        self._until = float("-inf")

    def __bool__(self) -> bool:
        return monotonic() < self._until

    async def renew(self, connection: Connection) -> bool:
        """Take or keep the lead for `seconds`."""
        asked_at = monotonic()
        leads = await workers.lead(connection, "sweeper", self._worker, self._seconds)
        self._until = asked_at + self._seconds if leads else float("-inf")
        return leads


class Takeover:
    """Waits for nothing but the database, and holds one connection."""

    def __init__(self, settings: Settings, pool: Pool, leadership: Leadership, announcer: Announcer) -> None:
        self._settings = settings
        self._pool = pool
        self._leadership = leadership
        self._announcer = announcer
        #: Workers that were missed when the last turn looked.
        self.gone: tuple[UUID, ...] = ()
        self._hurry_until = 0.0
        self._pauses = Pauses(share=MOST_BUSY, least=settings.sweep_seconds, most=LATEST_SECONDS)

    async def turn(self) -> None:
        async with self._pool.acquire() as connection:
            if await self._leadership.renew(connection):
                await self._expire_leases(connection)

    async def _expire_leases(self, connection: Connection) -> None:
        """At once when a worker is missed, else now and then: it reads all that has run since the last vacuum."""
        gone = await workers.gone(connection) if self._settings.presence else []
        if not set(self.gone).issuperset(gone):
            self._hurry_until = monotonic() + _HURRY_SECONDS
        self.gone = tuple(gone)
        if self._pauses.due or monotonic() < self._hurry_until:
            began = monotonic()
            await self._expire(connection, gone)
            self._pauses.done(began)

    async def _expire(self, connection: Connection, gone: Sequence[UUID]) -> None:
        ended, hints, failed = await sweeps.expire_leases(connection, gone, self._settings.max_losses)
        jobs_ended(failed)
        if ended:
            log.warning("leases of lost workers ended", leases=ended, workers=[str(owner) for owner in gone])
            metrics.EXPIRED.inc(ended)
            self._announcer.announce(hints)
