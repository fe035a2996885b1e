from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from tests.factories import Rows, terms
from tests.support.databases import Databases

Open = Callable[[], Awaitable[Rows]]


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
