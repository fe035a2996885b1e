"""Waiting for jobs to change: one query for everybody who waits in this process, however many they are."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from time import monotonic
from uuid import UUID

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine

from leasehold import reads
from leasehold.database import TRY_AGAIN

log = structlog.get_logger(__name__)

#: How often the database is asked while anybody waits, in seconds.
INTERVAL = 0.15
#: The loop spends at most this share of its time asking, however slow the database is.
_MOST_BUSY = 0.2
_AWAY: tuple[type[BaseException], ...] = (*TRY_AGAIN, SQLAlchemyError)


class JobWatch:
    """Runs its loop only while somebody waits."""

    def __init__(self, engine: AsyncEngine, *, interval: float = INTERVAL) -> None:
        self._engine = engine
        self._interval = interval
        self._waiters: defaultdict[UUID, dict[asyncio.Future[bool], int]] = defaultdict(dict)
        self._loop: asyncio.Task[None] | None = None
        self._released = False

    @property
    def waiting(self) -> int:
        return sum(len(waiters) for waiters in self._waiters.values())

    async def changed(self, job_id: UUID, after: int, seconds: float) -> bool:
        """True as soon as the job has an event numbered above `after`; False after `seconds`, or on `release_all`.

        A database that is away is waited for: the asker's own next query will say so.
        """
        if self._released:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters[job_id][waiter] = after
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(seconds):
                return await waiter
        except TimeoutError:
            return False
        finally:
            self._forget(job_id, waiter)

    def release_all(self) -> None:
        """Nobody waits any more, from now on: the process is about to stop."""
        self._released = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                _answer(waiter, said=False)

    async def close(self) -> None:
        self.release_all()
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    def _forget(self, job_id: UUID, waiter: asyncio.Future[bool]) -> None:
        waiters = self._waiters[job_id]
        waiters.pop(waiter, None)
        if not waiters:
            del self._waiters[job_id]

    async def _watch(self) -> None:
        while self._waiters:
            started = monotonic()
            try:
                numbers = await reads.event_numbers(self._engine, list(self._waiters))
            except _AWAY as error:
                log.warning("waiting jobs could not be looked at", error=type(error).__name__)
            else:
                self._wake(numbers)
            spent = monotonic() - started
            await asyncio.sleep(max(self._interval, spent / _MOST_BUSY))

    def _wake(self, numbers: dict[UUID, int]) -> None:
        for job_id, waiters in self._waiters.items():
            # A job that is gone counts as changed: its askers find out by reading.
            number = numbers.get(job_id)
            for waiter, after in waiters.items():
                if number is None or number > after:
                    _answer(waiter, said=True)


def _answer(waiter: asyncio.Future[bool], *, said: bool) -> None:
    if not waiter.done():
        waiter.set_result(said)
