"""A fault of the database counts the sessions that it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from chaos.faults.database import DatabaseFaults
from chaos.plan import Fault
from leasehold.runtime.transient import TRY_AGAIN


class Installation:
    """Only its database."""

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Any]:
        connection = await asyncpg.connect(self._url)
        try:
            yield connection
        finally:
            await connection.close()


async def test_sessions_are_terminated_and_counted(database_url: str) -> None:
    sessions = [await asyncpg.connect(database_url) for _ in range(2)]
    installation: Any = Installation(database_url)
    faults = DatabaseFaults(installation, asyncio.Lock())
    assert await faults.makers["F21"](Fault("F21 terminate sessions", 0.0)) == 2
    for session in sessions:
        with pytest.raises(TRY_AGAIN):
            await session.fetchval("SELECT 1")
        session.terminate()
