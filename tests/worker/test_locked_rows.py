"""Somebody has locked a job's row for longer than a statement may take: the worker's other jobs do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from leasehold.db.database import connect
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.transitions.workflows.records import Call, Recording
from leasehold.worker.attempts.journals import Journals
from leasehold.worker.leases.claim_batcher import ClaimBatcher
from tests.factories import Rows
from tests.worker.conftest import SECONDS


async def check(
    settings: Settings,
    rows: Rows,
    job_ids: list[UUID],
    ask: Callable[[int], Awaitable[object]],
    batcher: ClaimBatcher | Journals,
) -> None:
    """Lock the first job, ask for both in one batch, and wait for the answer about the second."""
    other = await connect(settings, "test")
    try:
        async with other.transaction():
            await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", job_ids[0])
            waiting, free = [asyncio.ensure_future(ask(number)) for number in range(2)]
            await asyncio.sleep(0)
            batcher.start()
            async with asyncio.timeout(SECONDS):
                assert await free
            assert not waiting.done()
        async with asyncio.timeout(SECONDS):
            assert await waiting
    finally:
        await batcher.close()
        await other.close()


def hasty(settings: Settings) -> Settings:
    return settings.model_copy(update={"database_timeout": 1.0})


async def test_the_claim_of_another_job_does_not_wait(settings: Settings, rows: Rows) -> None:
    tasks = [(await rows.submit())[0].hint.task_id for _ in range(2)]
    job_ids = [(await rows.task(task))["job_id"] for task in tasks]
    heartbeat: Any = SimpleNamespace(holds=lambda _task: False, record_lost_answer=lambda: None)
    batcher = ClaimBatcher(hasty(settings), rows.terms, heartbeat, 64)
    await check(settings, rows, job_ids, lambda number: batcher.claim(tasks[number]), batcher)


async def test_the_journal_of_another_workflow_does_not_wait(settings: Settings, rows: Rows) -> None:
    workflows = [await rows.leased() for _ in range(2)]
    journals = Journals(hasty(settings), lambda _hints: None, 64)

    async def record(number: int) -> bool:
        lease: Lease = workflows[number].lease
        return (await journals.record(Recording(lease, (Call("", 1, "signal", "go"),)))).committed

    await check(settings, rows, [workflow.job_id for workflow in workflows], record, journals)
