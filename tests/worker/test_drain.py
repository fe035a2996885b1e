"""A worker that drains, or stops at once, ends in time, also if a claim or a settlement waits for PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import connected
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker import parts
from leasehold.worker import worker as worker_module
from leasehold.worker.attempts import runner as runner_module
from leasehold.worker.attempts import stoppable
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker import stubborn_steps
from tests.worker.conftest import SECONDS


@pytest.fixture(autouse=True)
async def handlers_end() -> AsyncIterator[None]:
    """A test waits for the line that the handler logs, whatever level other tests have set for all loggers."""
    logger = logging.getLogger(stubborn_steps.__name__)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield
    stubborn_steps.let_go()
    logger.setLevel(level)


def hasty(settings: Settings, tmp_path: Path) -> Worker:
    """A worker that gives its attempts no time to drain."""
    changes: dict[str, Any] = {"poll_seconds": 0.1, "work_dir": str(tmp_path), "drain_seconds": 0.0}
    return Worker(settings.model_copy(update=changes), stubborn_steps.pipelines())


def give_time_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MIN_STOP_SECONDS", "_MAX_STOP_SECONDS"):
        monkeypatch.setattr(runner_module, name, SECONDS)


@asynccontextmanager
async def locked(settings: Settings, job_id: UUID) -> AsyncIterator[None]:
    """Somebody has locked the job's row."""
    async with connected(settings, "test") as other, other.transaction():
        await other.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", job_id)
        yield


async def submitted(rows: Rows) -> UUID:
    new = jobs.NewJob(stubborn_steps.stubborn, "t")
    await jobs.submit(rows.connection, [new])
    return new.id


async def until_it_waits(rows: Rows, connection: str) -> None:
    """Wait until a statement of the worker's connection of this name waits for a lock."""
    waiting = """SELECT EXISTS (SELECT FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = $1 AND wait_event_type = 'Lock')"""
    async with asyncio.timeout(SECONDS):
        while not await rows.connection.fetchval(waiting, f"leasehold {connection}"):
            await asyncio.sleep(0.02)


async def until_logged(rows: Rows, job_id: UUID) -> None:
    """Wait until the job's handler runs, and the line that it logs is written: only its settlement is left."""
    async with asyncio.timeout(SECONDS):
        while not await rows.connection.fetchval("SELECT EXISTS (SELECT FROM job_log WHERE job_id = $1)", job_id):
            await asyncio.sleep(0.02)


async def test_a_drain_ends_although_a_claim_waits_for_a_job_that_somebody_has_locked(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_RELEASE_SECONDS", 0.1)
    job_id = await submitted(rows)
    async with locked(settings, job_id), hasty(settings, tmp_path) as worker:
        await until_it_waits(rows, "claims")  # polls pass over the job, but its hint comes
        await asyncio.wait_for(worker.drain(), SECONDS)
    assert not stubborn_steps.begun
    # The claim does not go on now that the lock is gone: no other worker could see that its owner has ended.
    row = await rows.connection.fetchrow("SELECT status, attempt, losses FROM task WHERE job_id = $1", job_id)
    assert tuple(row or ()) == ("pending", 0, 0)
    assert await rows.connection.fetchval("SELECT count(*) FROM worker") == 0


async def test_a_drain_ends_although_a_settlement_waits_for_a_job_that_somebody_has_locked(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_RELEASE_SECONDS", 0.1)
    job_id = await submitted(rows)
    async with hasty(settings, tmp_path) as worker:
        await until_logged(rows, job_id)
        async with locked(settings, job_id):
            stubborn_steps.let_go()
            await until_it_waits(rows, "settlements")
            await asyncio.wait_for(worker.drain(), SECONDS)
    # The lock is gone before the worker has closed. The settlement was still in time then, or the task is given back.
    row = await rows.connection.fetchrow("SELECT status, attempt, losses FROM task WHERE job_id = $1", job_id)
    assert tuple(row or ()) in {("succeeded", 1, 0), ("pending", 0, 0)}
    assert await rows.connection.fetchval("SELECT count(*) FROM worker") == 0


async def test_a_drain_waits_for_what_a_handler_returns_in_its_time_to_stop(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "_RELEASE_SECONDS", SECONDS)
    give_time_to_stop(monkeypatch)
    job_id = await submitted(rows)
    async with hasty(settings, tmp_path) as worker:
        await until_logged(rows, job_id)
        draining = asyncio.create_task(worker.drain())
        async with asyncio.timeout(SECONDS):
            while not worker.parts.runner._releasing:
                await asyncio.sleep(0.02)
        stubborn_steps.let_go()
        await asyncio.wait_for(draining, SECONDS)
        assert (await rows.job(job_id))["status"] == "succeeded"


def test_a_handler_that_is_stopped_at_the_end_of_a_drain_has_its_whole_time_for_that() -> None:
    """And the worker then has time to close, before Kubernetes kills it: 15 s after `drain_seconds`."""
    assert runner_module._MAX_STOP_SECONDS + 1.0 <= worker_module._RELEASE_SECONDS <= 12.0


async def test_a_worker_that_stops_at_once_waits_for_no_settlement_of_a_job_that_somebody_has_locked(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a second signal. The handler returns in its time to stop, and PostgreSQL cannot take what it returns."""
    give_time_to_stop(monkeypatch)
    monkeypatch.setattr(stoppable, "_SETTLE_SECONDS", 0.05)
    worker = hasty(settings.model_copy(update={"database_timeout": 1.0}), tmp_path)
    await worker.__aenter__()
    job_id = await submitted(rows)
    await until_logged(rows, job_id)
    _, handler = stubborn_steps.begun[0]
    async with locked(settings, job_id):
        closing = asyncio.create_task(worker.__aexit__())
        async with asyncio.timeout(SECONDS):
            while not handler.cancelling():
                await asyncio.sleep(0.02)
        stubborn_steps.let_go()
        has_ended, _ = await asyncio.wait({closing}, timeout=SECONDS)
    await closing
    assert has_ended


async def test_a_worker_that_stops_at_once_gives_back_all_its_tasks_but_those_of_a_job_that_somebody_has_locked(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_CLOSE_SECONDS", 0.05)  # the handlers keep their connections
    monkeypatch.setattr(runner_module, "_MIN_STOP_SECONDS", 0.05)
    job_ids = [await submitted(rows) for _ in range(3)]
    async with AsyncExitStack() as stack:
        async with hasty(settings, tmp_path) as worker:
            for job_id in job_ids:
                await until_logged(rows, job_id)
            await stack.enter_async_context(locked(settings, job_ids[1]))
        tasks = await rows.connection.fetch("SELECT job_id, status, attempt, losses FROM task ORDER BY job_id")
        states = {row["job_id"]: (row["status"], row["attempt"], row["losses"]) for row in tasks}
        given_back = ("pending", 0, 0)
        assert states == {job_ids[0]: given_back, job_ids[1]: ("running", 1, 0), job_ids[2]: given_back}
        # With its row, other workers see at once that the owner of the task that is left has ended.
        assert await rows.connection.fetchval("SELECT id FROM worker") == worker.id
