"""The order workflow of the guide: approved, and compensated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from examples import approval
from examples.approval import Approval, Order
from leasehold.settings import Settings
from leasehold.worker.worker import Worker

SECONDS = 60.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
async def running(settings: Settings, tmp_path: Path) -> AsyncIterator[None]:
    quick = settings.model_copy(update={"work_dir": str(tmp_path), "poll_seconds": 0.1})
    approval.app.use(quick)
    async with Worker(quick, approval.app.pipelines()), asyncio.timeout(SECONDS):
        yield
    approval.app.close()


async def test_a_large_order_waits_for_its_approval(running: None) -> None:
    run = await approval.fulfil.asubmit(Order(id=7, amount=500))
    await run.asignal("approved", Approval(by="anna"))
    assert await run == "parcel-7"


async def test_what_cannot_be_shipped_is_refunded(running: None) -> None:
    run = await approval.fulfil.asubmit(Order(id=13, amount=5))
    assert await run == "charge-13 is refunded: nothing is left of it"


def test_the_guide_prints_the_example_as_it_is() -> None:
    code = (ROOT / "examples/approval.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in (ROOT / "docs/guides/workflows.md").read_text()
