"""Errors of the database that pass: the same statement may be tried again on a new connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

_T = TypeVar("_T")

#: Losing the connection, being told to go away, a read-only (demoted) server, a serialisation or deadlock
#: victim: the statement may be tried again on a new connection.
TRY_AGAIN: tuple[type[BaseException], ...] = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection broke between two of asyncpg's states, and is useless now
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.CannotConnectNowError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)


def may_try_again(error: BaseException) -> bool:
    """Whether the error is one of TRY_AGAIN, in fact and not only by its type. asyncpg reports a value that it cannot
    encode as an InterfaceError, too: that statement fails however often it is repeated.
    """
    return isinstance(error, TRY_AGAIN) and not isinstance(error, ValueError)


async def until_answered(work: Callable[[], Awaitable[_T]], *, within: float, pause: float = 0.2) -> _T:
    """Repeat idempotent `work` through TRY_AGAIN errors for at most `within` seconds, then raise the last one."""
    deadline = asyncio.get_running_loop().time() + within
    while True:
        try:
            return await work()
        except TRY_AGAIN as error:
            if not may_try_again(error) or asyncio.get_running_loop().time() + pause > deadline:
                raise
            await asyncio.sleep(pause)
