"""The batcher of journals: the requests of one round trip each get the answer for their own lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from leasehold.settings import Settings
from leasehold.transitions.workflows.records import Call, Recorded, Recording
from leasehold.worker.attempts.journals import Journals
from tests.factories import Rows, stale
from tests.worker.conftest import SECONDS


@pytest.fixture
async def journals(settings: Settings) -> AsyncIterator[Journals]:
    journals = Journals(settings, lambda _hints: None, at_most=64)
    yield journals
    await journals.close()


@pytest.mark.parametrize("lost_is_first", [True, False])
async def test_an_attempt_that_lost_its_workflow_and_the_same_workers_next_attempt_each_get_their_own_answer(
    journals: Journals, rows: Rows, lost_is_first: bool
) -> None:
    """The worker claims the workflow again while a call of its lost attempt still waits for PostgreSQL."""
    lease = (await rows.leased()).lease
    calls = (Call("", 1, "signal", "go"),)
    lost, won = Recording(stale(lease, epoch=lease.epoch - 1), calls), Recording(lease, calls)
    asked = [asyncio.create_task(journals.record(one)) for one in ([lost, won] if lost_is_first else [won, lost])]
    await asyncio.sleep(0)
    journals.start()  # so both wait for the first round trip
    async with asyncio.timeout(SECONDS):
        answers = await asyncio.gather(*asked)
    assert answers == [Recorded(not is_lost, cancelling=False) for is_lost in (lost_is_first, not lost_is_first)]
    assert await rows.connection.fetchval("SELECT count(*) FROM journal") == 1
