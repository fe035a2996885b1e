from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import cache

import pytest
from pydantic import SecretStr

from leasehold.settings import Settings
from tests.factories import Rows, terms
from tests.support.databases import Databases

Open = Callable[[], Awaitable[Rows]]


@pytest.fixture
def database_settings(database_url: str) -> Settings:
    return _defaults().model_copy(update={"database_url": SecretStr(database_url)})


@cache
def _defaults() -> Settings:
    """Made once: reading all sources of settings takes 10 ms of CPU time."""
    return Settings(_env_file=None)


@pytest.fixture
async def another(database_url: str, postgres: Databases) -> AsyncIterator[Open]:
    """Opens one more connection, with a worker identity of its own."""
    async with AsyncExitStack() as opened:

        async def open_one() -> Rows:
            return Rows(await opened.enter_async_context(postgres.session(database_url)), terms())

        yield open_one


@pytest.fixture
async def rows(another: Open) -> Rows:
    return await another()
