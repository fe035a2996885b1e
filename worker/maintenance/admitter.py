"""Admits (lets start) the jobs that wait at a concurrency limit, as soon as another job of that limit has ended."""

from __future__ import annotations

import asyncio
from uuid import UUID

from leasehold.broker.announcer import Announcer
from leasehold.db.database import Pool
from leasehold.transitions import concurrency

#: Seconds for which `turn` waits for further jobs to end. It then handles all these jobs together, because the locks
#: and counts cost the same for one job as for hundreds.
_GATHER_SECONDS = 0.02


class Admitter:
    """The admitter of one worker. If this worker dies, or the database does not answer, the duty `admissions` of the
    leader admits the jobs a little later. (The leader is the one worker that does the duties of the whole fleet.)
    """

    def __init__(self, pool: Pool, announcer: Announcer) -> None:
        self._pool = pool
        self._announcer = announcer
        self._search = concurrency.new_search()  # decides when `admit` may search for waiting jobs
        self._ended: set[UUID] = set()  # jobs that may have ended; only `concurrency.admit` finds out whether they have
        self._has_ended = asyncio.Event()  # set while `_ended` is not empty

    def may_have_ended(self, job_id: UUID) -> None:
        """Call this when a step of a job with concurrency limits is settled, because the job may have ended."""
        self._ended.add(job_id)
        self._has_ended.set()

    async def turn(self) -> float:
        """Wait until jobs may have ended, then admit other jobs at their limits. Returns 0, because the next turn needs
        no pause.
        """
        await self._has_ended.wait()
        await asyncio.sleep(_GATHER_SECONDS)
        self._has_ended.clear()
        ended, self._ended = self._ended, set()
        async with self._pool.acquire() as connection:
            names = await concurrency.limits_of(connection, [*ended])
            # `admit` first finds out which of these jobs have ended, and removes them from their limits.
            self._announcer.announce(await concurrency.admit(connection, names, [*ended], self._search))
        return 0.0
