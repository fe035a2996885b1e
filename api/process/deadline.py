"""The deadline of a request: how long it may wait for PostgreSQL in all, until its answer begins.

Each wait has a limit of its own (a turn, a connection, a statement), and a request has several waits. Without a
deadline over all of them a request whose database is away would take their sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from contextvars import ContextVar

from leasehold.db.database import Connection


class Deadline:
    """The rest of the time that a request may wait for PostgreSQL. Other waits (a body, a long poll, the store) do not
    count.
    """

    def __init__(self, seconds: float) -> None:
        self._left: float | None = seconds
        self._has_broken = False  # a connection, because nothing was left

    @property
    def is_over(self) -> bool:
        """Whether nothing is left."""
        return self._left == 0

    def lift(self) -> None:
        """From now on only each wait's own limit holds: the answer has begun, or the request is a bulk write."""
        self._left = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Count the time of the block. Raises TimeoutError when nothing is left."""
        if self._left is None:
            yield
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._left):
                yield
        finally:
            self._count(loop.time() - began)

    @asynccontextmanager
    async def using(self, connection: Connection) -> AsyncIterator[None]:
        """As `waiting`, while the block uses `connection`. When nothing is left, the connection is broken: so neither a
        statement nor the rollback after it waits any longer. The block then raises one of TRY_AGAIN.
        """
        if self._left is None:
            yield
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        breaking = loop.call_later(max(0.0, self._left), self._break, connection)
        try:
            yield
        except AttributeError as error:
            # asyncpg sends a statement in several steps. A connection that breaks between two of them has no protocol.
            if self._has_broken:
                raise TimeoutError("the request's time for PostgreSQL is over") from error
            raise
        finally:
            breaking.cancel()
            self._count(loop.time() - began)

    def _break(self, connection: Connection) -> None:
        if self._left is not None:
            self._has_broken = True
            connection.terminate()

    def _count(self, seconds: float) -> None:
        if self._left is not None:
            self._left = max(0.0, self._left - seconds)


@asynccontextmanager
async def lent_in_time(acquiring: AbstractAsyncContextManager[Connection]) -> AsyncIterator[Connection]:
    """Acquire a connection and lend it to the block, both within the deadline of the current request. Raises one of
    TRY_AGAIN.
    """
    limit = current()
    async with AsyncExitStack() as stack:
        async with limit.waiting():
            connection = await stack.enter_async_context(acquiring)
        await stack.enter_async_context(limit.using(connection))
        yield connection


_deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)
_UNBOUNDED = Deadline(0.0)
_UNBOUNDED.lift()


def begin(seconds: float) -> Deadline:
    """From now on the current request has `seconds` for PostgreSQL."""
    deadline = Deadline(seconds)
    _deadline.set(deadline)
    return deadline


def current() -> Deadline:
    """The deadline of the current request. Outside of requests it never comes."""
    return _deadline.get() or _UNBOUNDED
