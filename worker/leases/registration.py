"""Adds the worker's row to the table `worker` at the start, adds it again if it is lost, and deletes it at the end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from uuid import UUID

import asyncpg
import structlog

from leasehold.db.database import Connection, Pool
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.runtime.transient import TRY_AGAIN, until_answered
from leasehold.transitions import claims, workers
from leasehold.worker.leases.orphans import release_unlocked

log = structlog.get_logger(__name__)

#: Seconds for which a worker that registers waits for the database.
_PATIENCE_SECONDS = 60.0
#: Seconds for which a worker that drains tries to record that it drains.
_DRAIN_SECONDS = 2.0
#: Seconds for which a worker that ends waits for a connection of the pool. Without this limit, the worker would wait
#: without end if all connections stay in use.
_CONNECTION_SECONDS = 2.0
#: Seconds that the release of all tasks may take at the end of a worker. If it takes longer, the usual reason is that
#: somebody has locked the row of a job. Then the worker's row stays: by this row, other workers see that the owner of
#: the tasks has ended.
_RELEASE_SECONDS = 2.0
#: Seconds between two tries to release a task whose job somebody has locked.
_LOCKED_PAUSE_SECONDS = 0.1


class Registration:
    """The contents of the worker's row. The main loop and the heartbeat's thread use it, each on its own connection."""

    def __init__(
        self,
        worker: UUID,
        queues: Iterable[str],
        *,
        slots: Mapping[str, int] | None = None,
        pool: str = "default",
        handlers: Iterable[str] | None = None,
    ) -> None:
        """`slots`: queue -> its number of slots, for all queues that the worker may ever serve. `pool`:
        LEASEHOLD_WORKER_POOL, the name of a group of workers that scale together. `handlers`: the result of
        Pipelines.loaded_handlers; None: the row names no handlers.
        """
        self.worker = worker
        self._queues = sorted(queues)
        self._slots_by_queue = slots
        self._worker_pool = pool
        self._handlers = None if handlers is None else sorted(handlers)
        self._draining = False

    @property
    def queues(self) -> Sequence[str]:
        """The queues that the worker serves now."""
        return self._queues

    @property
    def draining(self) -> bool:
        """Whether the worker claims nothing more."""
        return self._draining

    @property
    def handlers(self) -> Sequence[str]:
        """The name `pipeline.step` of each step that the worker has code for."""
        return self._handlers or ()

    @property
    def _slots(self) -> list[int] | None:
        """The slots of each queue that the worker serves now, in the order of `_queues`."""
        return None if self._slots_by_queue is None else [self._slots_by_queue[queue] for queue in self._queues]

    async def write(self, connection: Connection) -> int:
        """Write the row, unless it exists. Returns the key of the presence lock, which shows that the worker lives."""
        return await workers.register(
            connection,
            self.worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("leasehold"),
            queues=self._queues,
            slots=self._slots,
            pool=self._worker_pool,
            handlers=self._handlers,
            draining=self._draining,
        )

    async def change(self, pool: Pool, queues: Iterable[str], handlers: Iterable[str] | None) -> None:
        """Record which queues the worker serves from now on, and which handlers it has. `handlers`: as for a new
        Registration.
        """
        self._queues = sorted(queues)
        self._handlers = None if handlers is None else sorted(handlers)

        async def change() -> None:
            async with pool.acquire() as connection, _missing_schema_as_outage():
                await workers.record_served(connection, self.worker, self._queues, self._slots, self._handlers)

        await until_answered(change, within=_PATIENCE_SECONDS)

    async def record_drain(self, pool: Pool) -> None:
        """Record that the worker claims nothing more. While its last attempts run, the worker must not count as one
        that serves its queues. If PostgreSQL does not answer, the drain goes on without the record, because a drain
        must end in time. The next `write` records the drain again, because a failover may lose this record, or the
        whole row.
        """
        self._draining = True
        try:
            async with asyncio.timeout(_DRAIN_SECONDS), pool.acquire() as connection, _missing_schema_as_outage():
                await workers.ask_to_drain(connection, self.worker)
        except TRY_AGAIN as error:
            log.warning("this worker could not record that it drains", error=type(error).__name__)


@asynccontextmanager
async def _missing_schema_as_outage() -> AsyncIterator[None]:
    """Raise ConnectionError if the database lacks a table or a column that the block uses. On a ConnectionError,
    `until_answered` repeats the block, so the worker waits until a migration has made the table or column.
    """
    try:
        yield
    except (asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError) as error:
        raise ConnectionError("the database is not migrated yet") from error


@asynccontextmanager
async def registered(pool: Pool, registration: Registration) -> AsyncIterator[Registration]:
    """Register the worker for the block."""

    async def register() -> None:
        async with pool.acquire() as connection, _missing_schema_as_outage():
            await registration.write(connection)

    await until_answered(register, within=_PATIENCE_SECONDS)
    try:
        yield registration
    finally:
        await _unregister(pool, registration.worker)


async def _unregister(pool: Pool, worker: UUID) -> None:
    """Delete the worker's row. Before that, release the tasks that the worker still has. (The worker still has tasks if
    it did not wait for its attempts: after a second signal, or after one of its parts has failed.) Without the release,
    these tasks would have an owner without a row, and no other worker could see that this owner is dead. The tasks
    would wait until their leases expire, and this would count as a loss of each task.
    """
    try:
        async with pool.acquire(timeout=_CONNECTION_SECONDS) as connection:
            await workers.resign(connection, worker)  # if this worker is the leader, another worker may lead now
            async with asyncio.timeout(_RELEASE_SECONDS):
                await _release_all(connection, worker)
            await workers.unregister(connection, worker)
    except TRY_AGAIN as error:
        log.warning("this worker could not unregister; the sweeper will delete its row", error=type(error).__name__)


async def _release_all(connection: Connection, worker: UUID) -> None:
    """Release all tasks of the worker, and also a task that a late settlement claims for the worker meanwhile. Each
    round releases the tasks of which nobody has locked the job's row. The next round tries the other tasks again.
    """
    while tasks := await claims.owned(connection, worker):
        released, ended = await release_unlocked(connection, worker, tasks)
        count_ended_jobs(ended)
        if released != tasks:
            await asyncio.sleep(_LOCKED_PAUSE_SECONDS)
