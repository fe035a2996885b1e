from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import connect
from leasehold.settings import Settings
from tests.factories import Rows, assert_history

SECONDS = 60.0


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Rows]:
    connection = await connect(settings, "test")
    yield Rows(connection)
    await connection.close()


async def end_of(rows: Rows, job_id: UUID) -> dict[str, Any]:
    """Wait for the job's end; its row, which is what its events add up to."""
    async with asyncio.timeout(SECONDS):
        while not (row := await rows.job(job_id))["finished_at"]:
            await asyncio.sleep(0.02)
    await assert_history(rows, job_id)
    return row
