"""Admits jobs that a concurrency limit holds back, as soon as another job of the same limit has ended."""

from __future__ import annotations

import asyncio
from uuid import UUID

from leasehold.broker.announcer import Announcer
from leasehold.db.database import Pool
from leasehold.transitions import concurrency

#: Ends within this time are handled together: the locks and counts of the limits cost the same for one as for hundreds.
_GATHER_SECONDS = 0.02


class Admitter:
    """The leader's admissions duty does a little later what an admitter misses: its worker died, or the database was
    away.
    """

    def __init__(self, pool: Pool, announcer: Announcer) -> None:
        self._pool = pool
        self._announcer = announcer
        self._ended: set[UUID] = set()
        self._has_ended = asyncio.Event()

    def may_have_ended(self, job_id: UUID) -> None:
        """A step was settled of a job under a concurrency limit: the job may have ended."""
        self._ended.add(job_id)
        self._has_ended.set()

    async def turn(self) -> float:
        await self._has_ended.wait()
        await asyncio.sleep(_GATHER_SECONDS)
        self._has_ended.clear()
        ended, self._ended = self._ended, set()
        async with self._pool.acquire() as connection:
            names = await concurrency.limits_of(connection, [*ended])
            self._announcer.announce(await concurrency.admit(connection, names, [*ended]))
        return 0.0
