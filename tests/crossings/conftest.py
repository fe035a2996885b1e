from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from leasehold.database import connect
from leasehold.settings import Settings
from tests.crossings.pair import Two


@pytest.fixture
async def two(database_url: str) -> AsyncIterator[Two]:
    """Two connections to a database of the test's own."""
    settings = Settings(database_url=database_url, _env_file=None)
    opened = [await connect(settings, "test") for _ in range(2)]
    yield Two(*opened)
    for connection in opened:
        await connection.close()
