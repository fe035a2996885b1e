"""The answer to a claim is lost: the worker holds nothing of which it does not know."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from leasehold.db.database import connect
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.claiming.claimer import Claimer
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.leases import claim_batcher
from leasehold.worker.leases.claim_batcher import ClaimBatcher
from tests.factories import Rows
from tests.worker.conftest import SECONDS
from tests.worker.deaf import Deaf


@pytest.fixture
def lost_answers() -> list[str]:
    """One entry for each time that the heartbeat hears of a lost answer."""
    return []


@pytest.fixture
def heartbeat(lost_answers: list[str]) -> Any:
    return SimpleNamespace(holds=lambda _task: False, record_lost_answer=lambda: lost_answers.append("lost"))


@pytest.mark.parametrize("loses", [False, True])
async def test_the_heartbeat_hears_of_a_claim_whose_answer_was_lost_while_its_run_was_cancelled(
    settings: Settings,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    heartbeat: Any,
    lost_answers: list[str],
    loses: bool,
) -> None:
    (announced,) = await rows.submit()
    task_id = announced.hint.task_id
    job_id = (await rows.task(task_id))["job_id"]

    async def cancel() -> None:
        await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")

    lost: list[str] = [] if loses else ["no answer"]

    async def deaf(*arguments: Any) -> Any:
        return Deaf(await connect(*arguments), lost, cancel)

    monkeypatch.setattr(claim_batcher, "connect", deaf)
    batcher = ClaimBatcher(settings, rows.terms, heartbeat, at_most=8)
    batcher.start()
    try:
        claimed = await asyncio.wait_for(batcher.claim(task_id), SECONDS)
    finally:
        await batcher.close()
    assert (await rows.task(task_id))["status"] == "running"
    assert (claimed is None, lost_answers) == ((True, ["lost"]) if loses else (False, []))


async def test_the_heartbeat_hears_of_a_poll_whose_answer_was_lost(
    rows: Rows, heartbeat: Any, lost_answers: list[str]
) -> None:
    (announced,) = await rows.submit()
    lost: list[str] = []

    @asynccontextmanager
    async def acquire() -> Any:
        yield Deaf(rows.connection, lost)

    pool, nothing = SimpleNamespace(acquire=acquire), SimpleNamespace()
    claimer = Claimer(pool, nothing, heartbeat, rows.terms, max_claims=8, takes_over=True)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError):
        await claimer.poll(("default",), 8, 0.0, Rooms())
    assert (await rows.task(announced.hint.task_id))["status"] == "running"
    assert lost_answers == ["lost"]
    assert (await claimer.poll(("default",), 8, 0.0, Rooms())).claimed == []
    assert lost_answers == ["lost"]
