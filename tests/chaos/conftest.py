from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chaos.servers import Servers


@pytest.fixture(scope="session")
async def servers() -> AsyncIterator[Servers]:
    async with Servers() as started:
        yield started
