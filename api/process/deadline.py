"""The deadline of a request: how long the request may wait for PostgreSQL in total, until its answer begins.

A request has several waits (for its tenant's turn, for a connection, for a statement), and each has its own limit. If
PostgreSQL does not answer, a request without a deadline would take the sum of these limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar

from leasehold.db.database import Connection


class Deadline:
    """The rest of the time that a request may wait for PostgreSQL. Other waits (for a body, for a change in a long
    poll, for the store) count only if the request holds a connection meanwhile.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds_left: float | None = seconds

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self._seconds_left == 0

    def lift(self) -> None:
        """End the deadline, for example because the answer has begun, or because the request is a bulk write. Each wait
        keeps its own limit.
        """
        self._seconds_left = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Count the time of the block. Raises TimeoutError when no time is left."""
        if self._seconds_left is None:
            yield
            return
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            async with asyncio.timeout(self._seconds_left):
                yield
        finally:
            self._count(loop.time() - began_at)

    @asynccontextmanager
    async def using(self, connection: Connection) -> AsyncIterator[None]:
        """Count the time of the block, which uses `connection`. When no time is left, close the connection by force.
        Then the statement in the block ends immediately, and so does the rollback after it. The block raises one of
        TRY_AGAIN (runtime/transient.py: the errors after which a request may be repeated).
        """
        if self._seconds_left is None:
            yield
            return
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        break_timer = loop.call_later(max(0.0, self._seconds_left), self._break, connection)
        try:
            yield
        finally:
            break_timer.cancel()
            self._count(loop.time() - began_at)

    def _break(self, connection: Connection) -> None:
        if self._seconds_left is not None:
            connection.terminate()

    def _count(self, seconds: float) -> None:
        if self._seconds_left is not None:
            self._seconds_left = max(0.0, self._seconds_left - seconds)


@asynccontextmanager
async def acquired_in_time(acquisition: AbstractAsyncContextManager[Connection]) -> AsyncIterator[Connection]:
    """Acquire a connection for the block. The time to acquire it and the time of the block both count for the deadline
    of the current request. Raises one of TRY_AGAIN (runtime/transient.py) when no time is left.
    """
    request_deadline = current()
    async with AsyncExitStack() as stack:
        async with request_deadline.waiting():
            connection = await stack.enter_async_context(acquisition)
        await stack.enter_async_context(request_deadline.using(connection))
        yield connection


_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)  # of the current request
#: The deadline outside of a request. It has no limit.
_UNBOUNDED = Deadline(0.0)
_UNBOUNDED.lift()


def begin(seconds: float) -> Deadline:
    """Give the current request `seconds` for PostgreSQL from now on."""
    deadline = Deadline(seconds)
    _deadline.set(deadline)
    return deadline


@contextmanager
def extra_time(seconds: float) -> Iterator[None]:
    """Inside the block, and in asyncio tasks that the block starts, the current request has `seconds` for PostgreSQL,
    however little of its deadline is left. Use it for what must be written after an error or after the request's work,
    such as an undo or the release of a reservation.
    """
    token = _deadline.set(Deadline(seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


@contextmanager
def without_limit() -> Iterator[None]:
    """Inside the block, and in asyncio tasks that the block starts, no deadline counts. Each wait keeps its own limit.
    After the block, the request's own deadline counts again. Use it for work whose result several requests use.
    """
    token = _deadline.set(None)
    try:
        yield
    finally:
        _deadline.reset(token)


def current() -> Deadline:
    """The deadline of the current request. Outside of a request, it is a deadline without a limit."""
    return _deadline.get() or _UNBOUNDED
