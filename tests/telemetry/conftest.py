from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasehold.db.database import connect
from leasehold.settings import Settings
from tests.factories import Rows, terms
from tests.scenarios.fleet import Fleet, open_fleet


@pytest.fixture
async def rows(database_url: str) -> AsyncIterator[Rows]:
    connection = await connect(Settings(database_url=database_url, _env_file=None), "test")
    yield Rows(connection, terms())
    await connection.close()


@pytest.fixture
async def fleet(settings: Settings, tmp_path: Path) -> AsyncIterator[Fleet]:
    opened = await open_fleet(settings, tmp_path)
    yield opened
    await opened.close()
    await opened.rows.connection.close()
