"""Admits jobs that a concurrency limit holds back, as soon as another job of the same limit has ended."""

from __future__ import annotations

import asyncio
from uuid import UUID

from leasehold.broker.announcer import Announcer
from leasehold.db.database import Pool
from leasehold.transitions import gates

#: Ends within this time are handled together: the locks and counts of the limits cost the same for one as for hundreds.
_GATHER_SECONDS = 0.02


class Admitter:
    """The leader's admissions duty does a little later what an admitter misses: its worker died, or the database was
    away.
    """

    def __init__(self, pool: Pool, announcer: Announcer) -> None:
        self._pool = pool
        self._announcer = announcer
        self._left: set[UUID] = set()
        self._has_left = asyncio.Event()

    def left(self, job_id: UUID) -> None:
        """A step was settled of a job under a concurrency limit: the job may have ended."""
        self._left.add(job_id)
        self._has_left.set()

    async def turn(self) -> float:
        await self._has_left.wait()
        await asyncio.sleep(_GATHER_SECONDS)
        self._has_left.clear()
        left, self._left = self._left, set()
        async with self._pool.acquire() as connection:
            names = await gates.gates_of(connection, [*left])
            self._announcer.announce(await gates.admit(connection, names, [*left]))
        return 0.0
