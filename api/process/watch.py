"""Waiting for jobs to change, or for work to come: one query for everybody who waits in this process, however many."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Generic, TypeVar
from uuid import UUID

from leasehold.db import reads, run_reads
from leasehold.db.database import Pool
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry.outages import DATABASE

#: How often the database is asked while anybody waits, in seconds.
INTERVAL = 0.15
#: The loop spends at most this share of its time asking, however slow the database is.
_MOST_BUSY = 0.2
_Key = TypeVar("_Key", UUID, str)


class _Watch(ABC, Generic[_Key]):
    """Who waits for which keys, in the order of their coming. Its loop runs only while somebody waits."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._waiters: defaultdict[_Key, dict[asyncio.Future[bool], int]] = defaultdict(dict)
        self._loop: asyncio.Task[None] | None = None
        self._released = False

    @abstractmethod
    async def _ask(self) -> Mapping[_Key, int]:
        """A number for each key that there is."""

    @abstractmethod
    def _due(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        """Those of a key's waiters that wait no longer, now that its number is this. None: the key is gone."""

    @property
    def waiting(self) -> int:
        return len({waiter for waiters in self._waiters.values() for waiter in waiters})

    async def _wait(self, keys: Sequence[_Key], mark: int, seconds: float) -> bool:
        """True as soon as one of the keys is due; False after `seconds`, or on `release_all`.

        A database that is away is waited for: the asker's own next query will say so.
        """
        if self._released or seconds <= 0:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiters[key][waiter] = mark
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(seconds):
                return await waiter
        except TimeoutError:
            return False
        finally:
            self._forget(keys, waiter)

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

    def _forget(self, keys: Sequence[_Key], waiter: asyncio.Future[bool]) -> None:
        for key in keys:
            waiters = self._waiters[key]
            waiters.pop(waiter, None)
            if not waiters:
                del self._waiters[key]

    async def _watch(self) -> None:
        while self._waiters:
            started = monotonic()
            try:
                numbers = await self._ask()
            except TRY_AGAIN as error:
                DATABASE.met(error, "watches")
            else:
                DATABASE.answered()
                for key, waiters in self._waiters.items():
                    for waiter in self._due(waiters, numbers.get(key)):
                        _answer(waiter, said=True)
            spent = monotonic() - started
            await asyncio.sleep(max(self._interval, spent / _MOST_BUSY))


class JobWatch(_Watch[UUID]):
    """A job's number is that of its last event."""

    def __init__(self, pool: Pool, *, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._pool = pool

    async def changed(self, job_id: UUID, after: int, seconds: float) -> bool:
        """True as soon as the job has an event numbered above `after`, or is gone; False as `_wait`."""
        return await self._wait([job_id], after, seconds)

    async def _ask(self) -> Mapping[UUID, int]:
        async with self._pool.acquire() as connection:
            return await reads.event_numbers(connection, list(self._waiters))

    def _due(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        # A job that is gone counts as changed: its askers find out by reading.
        return (waiter for waiter, after in waiters.items() if number is None or number > after)


class QueueWatch(_Watch[str]):
    """A queue's number is how many of its tasks could be claimed."""

    def __init__(self, pool: Pool, *, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._pool = pool

    async def runnable(self, queues: Sequence[str], seconds: float) -> bool:
        """True when one of the queues has a task for the asker, others who wait for it having come first: it may be
        gone when the asker claims. False as `_wait`.
        """
        return await self._wait(queues, 0, seconds)

    async def _ask(self) -> Mapping[str, int]:
        asked = {queue: len(waiters) for queue, waiters in self._waiters.items()}
        async with self._pool.acquire() as connection:
            return await run_reads.runnable(connection, asked)

    def _due(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        # As many as there are tasks: if all came, all but these would have come for nothing.
        still = (waiter for waiter in waiters if not waiter.done())
        return (waiter for waiter, _ in zip(still, range(number or 0), strict=False))


def _answer(waiter: asyncio.Future[bool], *, said: bool) -> None:
    if not waiter.done():
        waiter.set_result(said)
