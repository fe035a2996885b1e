"""What running steps say of their progress, into the database: the last word of each, twice a second at most."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

from leasehold.db.database import Pool
from leasehold.domain.lease import Lease
from leasehold.transitions.progress import Progress, report
from leasehold.transitions.quarantine import each_of

EVERY_SECONDS = 0.5
#: The duty's name.
DUTY = "progress"


class Reporter:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._said: dict[UUID, Progress] = {}
        self._spoken = asyncio.Event()

    def say(self, lease: Lease, percent: float, summary: str) -> None:
        self._said[lease.task_id] = Progress(lease, percent, summary)
        self._spoken.set()

    async def turn(self) -> None:
        """Wait until somebody has spoken, and write it down. What cannot be written is dropped: the next word says
        more; one that the database will not take costs the others nothing.
        """
        await self._spoken.wait()
        self._spoken.clear()
        said, self._said = self._said, {}

        async def write(some: Sequence[Progress]) -> Sequence[None]:
            await report(connection, some)
            return ()

        async with self._pool.acquire() as connection:
            await each_of(connection, DUTY, list(said.values()), write, lambda one: one.lease.task_id)
