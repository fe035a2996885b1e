"""What running steps say of their progress, into the database: the last word of each, twice a second at most."""

from __future__ import annotations

import asyncio
from uuid import UUID

import structlog

from leasehold.database import TRY_AGAIN, Pool
from leasehold.lease import Lease
from leasehold.transitions.progress import Progress, report

log = structlog.get_logger(__name__)

_EVERY_SECONDS = 0.5


class Reporter:
    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._said: dict[UUID, Progress] = {}
        self._spoken = asyncio.Event()

    def say(self, lease: Lease, percent: float, summary: str) -> None:
        self._said[lease.task_id] = Progress(lease, percent, summary)
        self._spoken.set()

    async def run(self) -> None:
        """For ever. What cannot be written now is dropped: the next word says more."""
        while True:
            await self._spoken.wait()
            self._spoken.clear()
            said, self._said = self._said, {}
            try:
                async with self._pool.acquire() as connection:
                    await report(connection, list(said.values()))
            except TRY_AGAIN as error:
                log.warning("progress was not written down", error=type(error).__name__)
            await asyncio.sleep(_EVERY_SECONDS)
