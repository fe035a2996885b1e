"""Submits jobs as the API does: it writes the rows in one statement, and publishes the hints right after the commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from bench.testbed import Installation
from leasehold.broker import make_broker
from leasehold.broker.announcer import Announcer
from leasehold.broker.base import Broker
from leasehold.db.database import Connection, Pool, make_pool
from leasehold.domain.pipeline import Pipeline
from leasehold.transitions import concurrency
from leasehold.transitions.jobs import NewJob, submit

_BATCH = 250
_CONNECT_SECONDS = 60.0
#: On a busy machine RabbitMQ may stand still for seconds. The submitter waits, because no worker here relays its hints.
_PATIENT = {"amqp_silence_seconds": 60.0, "amqp_publish_timeout": 60.0}


class Submitter:
    """Submits jobs. `announcer`: publishes the hints of committed jobs."""

    def __init__(self, pool: Pool, broker: Broker) -> None:
        self._pool = pool
        self._broker = broker
        self.announcer = Announcer(broker, self._on_connection)

    async def submit(self, *jobs: NewJob) -> None:
        """Write the jobs. Their hints are published right after the commit."""
        names = [(limit.tenant_id, limit.key) for job in jobs for limit in job.limits]
        async with self._pool.acquire() as connection:
            if names:
                async with connection.transaction():
                    hints = await submit(connection, jobs)
                hints += await concurrency.admit(connection, names, ())
            else:
                hints = await submit(connection, jobs)
        self.announcer.announce(hints)

    async def fill(self, pipeline: Pipeline, jobs: int) -> None:
        """Write `jobs` jobs in batches, and wait until the broker has confirmed every hint."""
        for start in range(0, jobs, _BATCH):
            batch = [NewJob(pipeline, "bench") for _ in range(min(_BATCH, jobs - start))]
            async with self._pool.acquire() as connection:
                hints = await submit(connection, batch)
            if await self.announcer.publish(hints) != len(hints):
                raise RuntimeError("the broker did not confirm every hint")

    async def _on_connection(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        async with self._pool.acquire() as connection:
            await work(connection)


@asynccontextmanager
async def submitter(installation: Installation) -> AsyncIterator[Submitter]:
    settings = installation.settings
    broker = make_broker(settings.model_copy(update=_PATIENT))
    async with make_pool(settings, "bench", settings.database_pool_size) as pool:
        await broker.open()
        opened = Submitter(pool, broker)
        opened.announcer.start()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                while not broker.connected:  # noqa: ASYNC110 - a connection has no event
                    await asyncio.sleep(0.01)
            yield opened
        finally:
            await opened.announcer.close()
            await broker.close()
