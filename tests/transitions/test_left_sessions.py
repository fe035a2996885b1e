"""A session whose client is gone leaves nothing behind in PostgreSQL, also while its statement waits for a lock."""

from __future__ import annotations

import asyncio

from leasehold.db.database import connect
from leasehold.settings import Settings
from leasehold.transitions import workers
from tests.factories import Rows
from tests.support.lock_waits import until_waiting

SECONDS = 60.0
_LOCK = "SELECT FROM job WHERE id = $1 FOR UPDATE"
_TAKE_PRESENCE = "SELECT pg_try_advisory_lock($1, 1)"


async def test_a_statement_that_waits_for_a_lock_ends_with_its_client(settings: Settings, rows: Rows) -> None:
    """Its session may hold the presence of a worker that was killed: others would take it for alive."""
    job_id = (await rows.leased()).job_id
    other = await connect(settings, "test")
    try:
        async with rows.connection.transaction():
            await rows.connection.execute(_LOCK, job_id)
            left = await connect(settings, "test")
            assert await left.fetchval(_TAKE_PRESENCE, workers.PRESENCE)
            waiting = asyncio.create_task(left.execute(_LOCK, job_id))
            await until_waiting(other)
            left.terminate()
            await asyncio.wait([waiting])
            async with asyncio.timeout(SECONDS):
                while not await other.fetchval(_TAKE_PRESENCE, workers.PRESENCE):
                    await asyncio.sleep(0.02)
    finally:
        await other.close()
