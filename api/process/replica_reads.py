"""Lends connections to PostgreSQL's standby. Only requests whose answers may be some seconds old get such connections
(http/may_read_standby.py).

While a request reads from the standby, every connection that it acquires leads to the standby. `Reading.lag` is the
greatest possible age of the request's answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from time import monotonic

from leasehold.api.process import deadline
from leasehold.api.process.deadline import Deadline
from leasehold.api.process.turnstile import Turnstile
from leasehold.db.database import Connection
from leasehold.db.replica import STANDBY_FAILED, Replica, ReplicaBusy
from leasehold.settings import Settings


class Reading:
    """What one request reads from the standby. `turns`: lets the tenants take turns at the standby's connections.
    `seconds`: how long all reads of the request together may take.
    """

    def __init__(self, replica: Replica, turns: Turnstile, seconds: float) -> None:
        self._replica, self._turns = replica, turns
        self._deadline = Deadline(seconds)
        self._as_of: float | None = None  # the time of the oldest state that was read, by the clock `monotonic`
        #: Whether a connection to the standby, or a read from it, has failed. An error of the primary, for example
        #: while the primary charges the request, does not count.
        self.has_failed = False

    @property
    def lag(self) -> float | None:
        """The greatest possible age of a row in the answer, in seconds, or None if the request has read nothing."""
        return None if self._as_of is None else monotonic() - self._as_of

    @property
    def is_over(self) -> bool:
        """Whether the request has used up its time for the standby. This does not mean that the standby has failed,
        because it may only be slow.
        """
        return self._deadline.is_over

    def waiting(self) -> AbstractAsyncContextManager[None]:
        """Count the time of the block as time for the standby. Raises TimeoutError when no time is left."""
        return self._deadline.waiting()

    def without_limit(self) -> Reading:
        """Another `Reading` of the same standby, without a limit of time. Use it for a read whose result several
        requests share.
        """
        reading = Reading(self._replica, self._turns, 0.0)
        reading._deadline.lift()
        return reading

    @asynccontextmanager
    async def lend(self, tenant_id: str) -> AsyncIterator[Connection]:
        """Lend a connection to the standby, as TenantPool.acquire does to the primary. Raises ReplicaUnusable, or one
        of TRY_AGAIN (runtime/transient.py). After these errors the primary answers the request.

        The time counts for two deadlines, the request's and the `Reading`'s. The deadline of the `Reading` is shorter,
        so that time is left for the primary. When a deadline is over, its method `waiting` ends a wait, and its method
        `using` ends a statement.
        """
        try:
            async with self._lend(tenant_id) as connection:
                yield connection
        except STANDBY_FAILED:
            self.has_failed = True
            raise

    @asynccontextmanager
    async def _lend(self, tenant_id: str) -> AsyncIterator[Connection]:
        request_deadline, reading_deadline = deadline.current(), self._deadline
        async with AsyncExitStack() as stack:
            try:
                async with request_deadline.waiting(), reading_deadline.waiting():
                    await stack.enter_async_context(self._turns.turn(tenant_id))
            except TimeoutError:
                # no turn became free before one of the two deadlines
                raise _busy() from None
            # Do not catch a TimeoutError here. It is one of TRY_AGAIN, and means that the standby is slow or down.
            async with request_deadline.waiting(), reading_deadline.waiting():
                connection = await stack.enter_async_context(self._replica.pool.acquire())
            await stack.enter_async_context(request_deadline.using(connection))
            await stack.enter_async_context(reading_deadline.using(connection))
            self._include(await self._replica.check(connection))  # the time of the state that the connection reads
            yield connection

    def include(self, other: Reading) -> None:
        """Let `lag` also cover the rows that another request has read (`other`). Call this if the answer of this
        request contains such rows.
        """
        if other._as_of is not None:
            self._include(other._as_of)

    def _include(self, as_of: float) -> None:
        self._as_of = as_of if self._as_of is None else min(self._as_of, as_of)


#: The reading of the current request; None: the request reads from the primary.
_reading: ContextVar[Reading | None] = ContextVar("reading", default=None)


@contextmanager
def on_primary() -> Iterator[None]:
    """Inside the block, and in asyncio tasks that it starts, the current request reads from the primary."""
    with reading_as(None):
        yield


@contextmanager
def reading_as(reading: Reading | None) -> Iterator[None]:
    """Inside the block, and in asyncio tasks that it starts, `reading` is the reading of the current request. If
    `reading` is None, the request reads from the primary.
    """
    token = _reading.set(reading)
    try:
        yield
    finally:
        _reading.reset(token)


def current() -> Reading | None:
    """The reading of the current request, or None if the request reads from the primary."""
    return _reading.get()


def current_lag() -> float | None:
    """The greatest possible age of the request's answer, in seconds, or None if the answer is from the primary."""
    reading = current()
    return None if reading is None else reading.lag


class ReplicaReads:
    """Gives requests access to the standby. Each request gets its own `Reading`. `size`: the number of connections to
    the standby. `patience`: the seconds for which a request waits for one of these connections.
    """

    def __init__(self, settings: Settings, replica: Replica, size: int, patience: float) -> None:
        self.replica = replica
        #: This many seconds after a write, every answer from the standby includes the write.
        self.fresh_after_seconds = settings.database_replica_max_lag
        # One connection of the pool stays free for `Replica.note`, which checks the standby. Without this connection,
        # a busy standby would seem to be down.
        self._turns = Turnstile(at_most=size - 1, per_tenant=max(1, size - 2), patience=patience, refusal=_busy)
        # A request may use half of its time for the standby. The other half is left for the primary, which answers if
        # the standby fails.
        self._seconds = settings.database_timeout / 2

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Inside the block, the current request reads from the standby."""
        reading = Reading(self.replica, self._turns, self._seconds)
        with reading_as(reading):
            yield reading


def _busy() -> ReplicaBusy:
    """The error of a request that gets no turn at the standby in time. The primary then answers the request."""
    return ReplicaBusy("too many requests wait for it")
