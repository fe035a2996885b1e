"""Letting held jobs in as soon as one that shares a gate with them has ended."""

from __future__ import annotations

import asyncio
from uuid import UUID

from leasehold.broker.announcer import Announcer
from leasehold.db.database import Pool
from leasehold.transitions import gates

#: Ends that come together are taken together: the gates' locks and counts cost the same for one as for hundreds.
_GATHER_SECONDS = 0.02


class Admitter:
    """What is missed here (a worker died, the database was away) the sweeper does a little later."""

    def __init__(self, pool: Pool, announcer: Announcer) -> None:
        self._pool = pool
        self._announcer = announcer
        self._left: set[UUID] = set()
        self._somebody_left = asyncio.Event()

    def left(self, job_id: UUID) -> None:
        """A step of a gated job was settled: the job may have ended."""
        self._left.add(job_id)
        self._somebody_left.set()

    async def turn(self) -> float:
        await self._somebody_left.wait()
        await asyncio.sleep(_GATHER_SECONDS)
        self._somebody_left.clear()
        left, self._left = self._left, set()
        async with self._pool.acquire() as connection:
            names = await gates.gates_of(connection, [*left])
            self._announcer.announce(await gates.admit(connection, names, [*left]))
        return 0.0
