"""Transient errors of PostgreSQL, after which the same statement may succeed on a new connection. `until_answered`
repeats work after such errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import asyncpg

from leasehold.runtime.gather import check_not_cancelled

_Result = TypeVar("_Result")

#: Errors that have one of three causes:
#: - The connection is lost.
#: - The server cannot do the work now: it shuts down, is read-only because it was demoted, lacks disk, memory or
#:   connections, or its disk fails.
#: - The transaction met a deadlock or a serialisation failure, or got a lock too late (see TIMED_OUT).
TRY_AGAIN: tuple[type[BaseException], ...] = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the connection broke inside asyncpg and cannot be used any more
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.CannotConnectNowError,
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresIOError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
)
#: The errors of a statement that took too long. Usually the statement has waited for a lock. The limit is the
#: `command_timeout` of the connection, or a `statement_timeout` or `lock_timeout` that an operator has set for the
#: database role.
TIMED_OUT: tuple[type[Exception], ...] = (TimeoutError, asyncpg.QueryCanceledError, asyncpg.LockNotAvailableError)


def may_try_again(error: BaseException) -> bool:
    """Whether a repetition may succeed after this error. It may succeed after each error of TRY_AGAIN, except an error
    that is also a ValueError. asyncpg raises such an InterfaceError for a value that it cannot encode.
    """
    return isinstance(error, TRY_AGAIN) and not isinstance(error, ValueError)


async def until_answered(work: Callable[[], Awaitable[_Result]], *, within: float, pause: float = 0.2) -> _Result:
    """Run `work`, and repeat it after errors of TRY_AGAIN. After `within` seconds, raise the last error.

    `work` must be idempotent. `pause`: seconds between two tries.
    """
    deadline = asyncio.get_running_loop().time() + within
    while True:
        try:
            return await work()
        except TRY_AGAIN as error:
            check_not_cancelled()
            if not may_try_again(error) or asyncio.get_running_loop().time() + pause > deadline:
                raise
            await asyncio.sleep(pause)
