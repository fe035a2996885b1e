"""Long polls. A request waits here for one of four changes: a job has a new event, new log lines or new chunks of its
stream, or a queue has work. For each of these four the process has a watch (JobWatch, LogWatch, StreamWatch,
QueueWatch).

One query every INTERVAL serves all requests of the process that wait at the same watch. It reads at most _MAX_KEYS jobs
or queues. If requests wait for more than that, each query reads the jobs or queues that were read longest ago. Among
queues, the tenants take turns. So a tenant that waits for very many queues (up to 50 in a request) only makes its own
waits longer.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Generic, TypeVar
from uuid import UUID

from leasehold.db import event_reads, log_reads, run_reads
from leasehold.db.database import Pool
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.telemetry.outages import DATABASE

#: Seconds between two queries while any request waits.
INTERVAL = 0.15
#: The loop spends at most this fraction of its time in queries, so that a slow database gets fewer queries.
_QUERY_SHARE = 0.2
#: The most keys (jobs or queues) of one query.
_MAX_KEYS = 1000
#: What a request waits for: the id of a job, or the name of a queue.
_Key = TypeVar("_Key", UUID, str)


class _Watch(ABC, Generic[_Key]):
    """Requests that wait for a change. A key is what they wait for: the id of a job, or the name of a queue. While any
    request waits, a loop queries a number for each key, such as the number of a job's last event.

    Each request has a mark, such as the last number that the client knows. `_ready` compares the marks of a key's
    requests with the key's number, and chooses the requests that go on. A subclass defines the numbers.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        #: Key -> its requests in the order of arrival, each with its mark.
        self._waiters: defaultdict[_Key, dict[asyncio.Future[bool], int]] = defaultdict(dict)
        #: The keys of `_waiters`, by owner. Owners and keys stand in the order in which they were read, the latest at
        #: the end.
        self._keys: OrderedDict[str, OrderedDict[_Key, None]] = OrderedDict()
        self._query_task: asyncio.Task[None] | None = None  # the loop `_watch`
        self._released = False  # True after `release_all`: no request waits any more

    @abstractmethod
    async def _read_numbers(self, keys: Sequence[_Key]) -> Mapping[_Key, int]:
        """Query the numbers of the keys. A key that does not exist is left out."""

    @abstractmethod
    def _ready(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        """The waiters of a key that can go on. `waiters`: in the order of arrival, with their marks. `number`: the
        key's number, or None if the key does not exist any more.
        """

    def _owner_of(self, key: _Key) -> str:  # noqa: ARG002 - for subclasses
        """The owner of the key. The owners take turns if one query cannot read all keys. By default all keys have one
        owner.
        """
        return ""

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len({waiter for waiters in self._waiters.values() for waiter in waiters})

    async def _wait(self, keys: Sequence[_Key], mark: int, seconds: float) -> bool:
        """Wait until one of the keys changes. Returns True if `_ready` has chosen this request. Returns False if
        `seconds` are over, or if the process is about to stop.

        During an outage of the database the wait goes on, and raises no error. After the wait, the request makes its
        next query, and that query raises the error.
        """
        if self._released or seconds <= 0:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        for key in keys:
            self._waiters[key][waiter] = mark
            self._keys.setdefault(self._owner_of(key), OrderedDict())[key] = None
        if self._query_task is None or self._query_task.done():
            self._query_task = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(seconds):
                return await waiter
        except TimeoutError:
            return False
        finally:
            self._forget(keys, waiter)

    def release_all(self) -> None:
        """End every wait immediately, because the process is about to stop. Waits that begin later end at once."""
        self._released = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                _resolve(waiter, changed=False)

    async def close(self) -> None:
        self.release_all()
        if self._query_task is not None:
            await cancel_and_wait(self._query_task)

    def _forget(self, keys: Sequence[_Key], waiter: asyncio.Future[bool]) -> None:
        for key in dict.fromkeys(keys):
            waiters = self._waiters[key]
            waiters.pop(waiter, None)
            if not waiters:
                del self._waiters[key]
                owner = self._owner_of(key)
                del self._keys[owner][key]
                if not self._keys[owner]:
                    del self._keys[owner]

    def _next_keys(self) -> list[_Key]:
        """The keys of the next query, at most _MAX_KEYS. Takes one key of each owner in turn. The owners and keys that
        were read longest ago come first.
        """
        turns = deque((owner, iter(keys)) for owner, keys in self._keys.items())
        chosen: list[tuple[str, _Key]] = []
        while turns and len(chosen) < _MAX_KEYS:
            owner, unread_keys = turns.popleft()
            # This loop runs at most once. It takes the next key of the owner. An owner without a further key leaves
            # `turns`.
            for key in unread_keys:
                chosen.append((owner, key))
                turns.append((owner, unread_keys))
                break
        for owner, key in chosen:
            self._keys.move_to_end(owner)
            self._keys[owner].move_to_end(key)
        return [key for _, key in chosen]

    async def _watch(self) -> None:
        """The loop. It ends when no request waits, and the next request starts it again."""
        while self._waiters:
            started_at, pause = monotonic(), self._interval
            keys = self._next_keys()  # a key that is added during the query waits for the next query
            try:
                numbers = await self._read_numbers(keys)
            except TRY_AGAIN as error:
                DATABASE.record_error(error, "watches")
            else:
                DATABASE.record_answer()
                pause = max(pause, (monotonic() - started_at) / _QUERY_SHARE)
                for key in keys:
                    for waiter in self._ready(self._waiters.get(key, {}), numbers.get(key)):
                        _resolve(waiter, changed=True)
            await asyncio.sleep(pause)


class JobWatch(_Watch[UUID]):
    """A job's number is the number of its last event."""

    def __init__(self, pool: Pool, *, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._pool = pool

    async def changed(self, job_id: UUID, after: int, seconds: float) -> bool:
        """Wait until the job has an event with a number above `after`, or is deleted. Returns False if `seconds` are
        over, or if the process is about to stop.
        """
        return await self._wait([job_id], after, seconds)

    async def _read_numbers(self, keys: Sequence[UUID]) -> Mapping[UUID, int]:
        async with self._pool.acquire() as connection:
            return await event_reads.last_event_numbers(connection, keys)

    def _ready(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        # A deleted job counts as changed. The request then reads the job, and learns that it does not exist.
        return (waiter for waiter, after in waiters.items() if number is None or number > after)


class LogWatch(JobWatch):
    """A job's number is the number of its last log line. A job that has ended has a number above all its lines."""

    async def _read_numbers(self, keys: Sequence[UUID]) -> Mapping[UUID, int]:
        async with self._pool.acquire() as connection:
            return await log_reads.log_numbers(connection, keys)


class StreamWatch(JobWatch):
    """A job's number is the number of its last chunk. A job that has ended has a number above all its chunks."""

    async def _read_numbers(self, keys: Sequence[UUID]) -> Mapping[UUID, int]:
        async with self._pool.acquire() as connection:
            return await log_reads.stream_numbers(connection, keys)


class QueueWatch(_Watch[str]):
    """A queue's number is the number of its tasks that can be claimed now."""

    def __init__(self, pool: Pool, *, interval: float = INTERVAL) -> None:
        super().__init__(interval)
        self._pool = pool

    def _owner_of(self, key: str) -> str:
        return key.rpartition(":")[0]  # the name of a queue is `ext:TENANT:NAME`, and its owner is `ext:TENANT`

    async def runnable(self, queues: Sequence[str], seconds: float) -> bool:
        """Wait until one of the queues has a claimable task for this request. If a queue has fewer tasks than waiting
        requests, only the requests that have waited longest go on. Returns False if `seconds` are over, or if the
        process is about to stop.

        Another worker may claim the task first. Then the caller claims nothing, and waits again.
        """
        return await self._wait(queues, 0, seconds)

    async def _read_numbers(self, keys: Sequence[str]) -> Mapping[str, int]:
        waiter_counts = {queue: len(self._waiters[queue]) for queue in keys}
        async with self._pool.acquire() as connection:
            return await run_reads.count_runnable(connection, waiter_counts)

    def _ready(self, waiters: Mapping[asyncio.Future[bool], int], number: int | None) -> Iterator[asyncio.Future[bool]]:
        # Only as many requests go on as the queue has tasks, because further requests would claim nothing.
        unresolved = (waiter for waiter in waiters if not waiter.done())
        return (waiter for waiter, _ in zip(unresolved, range(number or 0), strict=False))


def _resolve(waiter: asyncio.Future[bool], *, changed: bool) -> None:
    if not waiter.done():
        waiter.set_result(changed)
