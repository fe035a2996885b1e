from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache

import pytest
from pydantic import SecretStr

from leasehold.db.database import connect
from leasehold.settings import Settings
from tests.factories import Rows, terms

Open = Callable[[], Awaitable[Rows]]


@pytest.fixture
def database_settings(database_url: str) -> Settings:
    return _defaults().model_copy(update={"database_url": SecretStr(database_url)})


@cache
def _defaults() -> Settings:
    """Made once: reading all sources of settings takes 10 ms of CPU time."""
    return Settings(_env_file=None)


@pytest.fixture
async def another(database_settings: Settings) -> AsyncIterator[Open]:
    """Opens one more connection, with a worker identity of its own."""
    opened = []

    async def open_one() -> Rows:
        connection = await connect(database_settings, "test")
        opened.append(connection)
        return Rows(connection, terms())

    yield open_one
    for connection in opened:
        await connection.close()


@pytest.fixture
async def rows(another: Open) -> Rows:
    return await another()
