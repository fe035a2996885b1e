"""The worker's row in the registry: added at the start, deleted at the end."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import version
from uuid import UUID

import asyncpg
import structlog

from leasehold.db.database import Pool
from leasehold.runtime.transient import TRY_AGAIN, until_answered
from leasehold.transitions import workers

log = structlog.get_logger(__name__)

#: The seconds that the database may be away while a worker registers.
_PATIENCE_SECONDS = 60.0


@asynccontextmanager
async def registered(pool: Pool, worker: UUID, queues: Iterable[str]) -> AsyncIterator[int]:
    """Register the worker for the block. Yields its presence key."""
    presence_key = await _register(pool, worker, sorted(queues))
    try:
        yield presence_key
    finally:
        await _unregister(pool, worker)


async def change_queues(pool: Pool, worker: UUID, queues: Iterable[str]) -> None:
    """Record that the worker serves these queues from now on."""

    async def change() -> None:
        async with pool.acquire() as connection:
            await workers.serves(connection, worker, sorted(queues))

    await until_answered(change, within=_PATIENCE_SECONDS)


async def _register(pool: Pool, worker: UUID, queues: list[str]) -> int:
    async def register() -> int:
        async with pool.acquire() as connection:
            try:
                return await workers.register(
                    connection,
                    worker,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    version=version("leasehold"),
                    queues=queues,
                )
            except asyncpg.UndefinedTableError as error:
                raise ConnectionError("the database is not migrated yet") from error

    return await until_answered(register, within=_PATIENCE_SECONDS)


async def _unregister(pool: Pool, worker: UUID) -> None:
    try:
        async with pool.acquire() as connection:
            await workers.resign(connection, worker)
            await workers.unregister(connection, worker)
    except TRY_AGAIN as error:
        log.warning("this worker could not unregister; the sweeper will delete its row", error=type(error).__name__)
