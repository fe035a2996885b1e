from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from leasehold.settings import Settings
from tests.scenarios.fleet import Fleet, open_fleet


@pytest.fixture
async def fleet(settings: Settings, tmp_path: Path) -> AsyncIterator[Fleet]:
    opened = await open_fleet(settings, tmp_path)
    yield opened
    await opened.close()
    await opened.rows.connection.close()
