"""Somebody has locked a job's row for longer than a statement may take: the worker's other jobs do not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from leasehold.db import log_reads
from leasehold.db.database import connect, connected
from leasehold.db.log_reads import LogFilter
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.transitions.workflows.records import Call, Recording
from leasehold.worker.attempts.chunk_writer import ChunkWriter
from leasehold.worker.attempts.journals import Journals
from leasehold.worker.attempts.log_and_stream import LogAndStreamWriters
from leasehold.worker.leases.claim_batcher import ClaimBatcher
from tests.factories import Rows
from tests.support.lock_waits import until_waiting
from tests.worker.conftest import SECONDS


async def check(
    settings: Settings,
    rows: Rows,
    job_ids: list[UUID],
    ask: Callable[[int], Awaitable[object]],
    batcher: ClaimBatcher | Journals | ChunkWriter[Any, Any],
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


async def test_a_claim_that_waits_for_a_lock_ends_with_its_worker_and_its_hint_is_left_to_others(
    settings: Settings, rows: Rows
) -> None:
    """Else PostgreSQL would give the task to the worker once the lock is gone, when the worker has ended."""
    (announced,) = await rows.submit()
    task_id = announced.hint.task_id
    heartbeat: Any = SimpleNamespace(holds=lambda _task: False, record_lost_answer=lambda: None)
    batcher = ClaimBatcher(settings, rows.terms, heartbeat, 64)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    async with connected(settings, "test") as other, other.transaction():
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", (await rows.task(task_id))["job_id"])
        claiming = asyncio.create_task(batcher.claim(task_id))
        batcher.start()
        await until_waiting(rows.connection)
        await batcher.close()
        await asyncio.wait({claiming}, timeout=SECONDS)
        async with asyncio.timeout(SECONDS):  # asyncpg asks PostgreSQL to cancel the statement, and waits for no answer
            while await rows.connection.fetchval(waiting):
                await asyncio.sleep(0.01)
    assert claiming.cancelled()  # after an error, the slot pool would acknowledge the hint
    task = await rows.task(task_id)
    assert (task["status"], task["lease_owner"], task["epoch"]) == ("pending", None, 0)


async def test_the_journal_of_another_workflow_does_not_wait(settings: Settings, rows: Rows) -> None:
    workflows = [await rows.leased() for _ in range(2)]
    journals = Journals(hasty(settings), lambda _hints: None, 64)

    async def record(number: int) -> bool:
        lease: Lease = workflows[number].lease
        return (await journals.record(Recording(lease, (Call("", 1, "signal", "go"),)))).committed

    await check(settings, rows, [workflow.job_id for workflow in workflows], record, journals)


@pytest.mark.parametrize("kind", ["log", "stream"])
async def test_what_an_attempt_of_another_job_logs_and_emits_does_not_wait(
    settings: Settings, rows: Rows, kind: str
) -> None:
    """The first chunk of a job waits for the job's row. Each attempt settles only when its last chunk is written."""
    attempts = [await rows.leased() for _ in range(2)]
    writers = LogAndStreamWriters(hasty(settings))
    buffers = [writers.make(claimed) for claimed in attempts]

    async def write(number: int) -> bool:
        stream, lines = buffers[number]
        if kind == "log":
            lines.buffer.add("info", "shop", "one")
            await writers.logs.finish(lines)
        else:
            stream.buffer.emit("one")
            await writers.streams.finish(stream)
        statement = f"SELECT EXISTS (SELECT FROM job_{kind} WHERE job_id = $1)"
        return bool(await rows.connection.fetchval(statement, attempts[number].job_id))

    writer = writers.logs if kind == "log" else writers.streams
    await check(settings, rows, [claimed.job_id for claimed in attempts], write, writer)


async def test_the_lines_of_a_job_that_waits_keep_their_order(settings: Settings, rows: Rows) -> None:
    """The Batcher may write a later chunk before one that it has set aside."""
    attempt = await rows.leased()
    tenant_id = (await rows.job(attempt.job_id))["tenant_id"]
    writers = LogAndStreamWriters(hasty(settings))
    _, lines = writers.make(attempt)
    other = await connect(settings, "test")
    writers.logs.start()
    try:
        async with asyncio.timeout(SECONDS):
            async with other.transaction():
                await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", attempt.job_id)
                lines.buffer.add("info", "shop", "first")
                await writers.logs.turn()
                while not writers.logs._batcher._aside:
                    await asyncio.sleep(0.02)
                lines.buffer.add("info", "shop", "second")
                await writers.logs.turn()
            lines.buffer.add("info", "shop", "third")
            await writers.logs.finish(lines)
        read = await log_reads.log_page(rows.connection, tenant_id, attempt.job_id, 0, LogFilter(), 100)
        assert [line["message"] for line in read] == ["first", "second", "third"]
    finally:
        await writers.logs.close()
        await other.close()
