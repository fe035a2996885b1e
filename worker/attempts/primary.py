"""Lets attempts read and write at the primary, a server of PostgreSQL that takes writes. A standby may lack the newest
rows. If an attempt read from a standby, it might not see a note, an input or a result, and do its work twice, or
wrongly.

While no server takes writes, these functions wait for as long as the attempt trusts its lease (`HeldLease.trusted`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from leasehold.db.database import Connection, Pool
from leasehold.db.servers import check_takes_writes
from leasehold.domain.errors import LeaseLost
from leasehold.runtime.transient import TRY_AGAIN, until_answered
from leasehold.worker.leases.held_lease import HeldLease

_Answer = TypeVar("_Answer")


@asynccontextmanager
async def primary_connection(pool: Pool, held: HeldLease) -> AsyncIterator[Connection]:
    """Lend a connection of the pool to the attempt that has the lease `held`, for the time of the block. While no
    server takes writes, this function waits. Raises LeaseLost if the lease stops being trusted before a server takes
    writes. Also raises LeaseLost if the handler was given up (it did not stop when its attempt ended). If the handler
    is given up during the block, the connection is cut.
    """

    async def acquire() -> PoolConnectionProxy[asyncpg.Record]:
        held.check_may_borrow()  # check before the wait for a connection; `borrow` checks again after it
        acquired = await pool.acquire()
        try:
            check_takes_writes(acquired)
            held.borrow(acquired)
        except (asyncpg.ReadOnlySQLTransactionError, LeaseLost):
            await pool.release(acquired)
            raise
        return acquired

    connection = await _while_trusted(held, acquire)
    try:
        yield connection
    finally:
        held.give_back(connection)
        await pool.release(connection)


async def on_primary(pool: Pool, held: HeldLease, work: Callable[[Connection], Awaitable[_Answer]]) -> _Answer:
    """Call `work` with a connection, and return its result. After an error of TRY_AGAIN, for example a lost connection,
    call `work` again. So its writes must be idempotent: PostgreSQL may have committed them in the first call, or may
    commit them later. Raises LeaseLost as `primary_connection` does.
    """

    async def work_once() -> _Answer:
        async with primary_connection(pool, held) as connection:
            return await work(connection)

    return await _while_trusted(held, work_once)


async def _while_trusted(held: HeldLease, work: Callable[[], Awaitable[_Answer]]) -> _Answer:
    """Call `work`, and repeat it after each error of TRY_AGAIN until it returns. Raises LeaseLost after such an error
    if the lease is no longer trusted.
    """

    async def try_once() -> _Answer:
        try:
            return await work()
        except TRY_AGAIN:
            if not held.trusted():
                raise LeaseLost from None
            raise

    return await until_answered(try_once, within=float("inf"))
