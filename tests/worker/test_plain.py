"""Handlers that are plain functions: in threads, without harm to the loop, and stopped as far as a thread can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from structlog.testing import capture_logs

from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker import metrics
from leasehold.worker.attempts import stalls, threads
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker.conftest import SECONDS, end_of
from tests.worker.plain_steps import GO_ON, HEARD, HUNG, hanging, pipelines, plain, rude


@pytest.fixture
def changed(settings: Settings, tmp_path: Path) -> Settings:
    HEARD.clear()
    HUNG.clear()
    GO_ON.clear()
    stalls._warned_at.clear()
    changes: dict[str, Any] = {
        "poll_seconds": 0.1,
        "renew_seconds": 0.5,
        "work_dir": str(tmp_path),
        "worker_threads": 2,
        "pipelines": "tests.worker.plain_steps:pipelines",
    }
    return settings.model_copy(update=changes)


@pytest.fixture
async def worker(changed: Settings) -> AsyncIterator[Worker]:
    async with Worker(changed, pipelines()) as running:
        yield running
    GO_ON.set()


async def submit(rows: Rows, does: str) -> UUID:
    new = jobs.NewJob(hanging if does == "hang" else plain, "t", params={"does": does})
    await jobs.submit(rows.connection, [new])
    return new.id


async def hang_in_both_threads(rows: Rows) -> None:
    """One job has an attempt for each thread. On a busy machine its time limit may come before a thread begins."""
    async with asyncio.timeout(SECONDS):
        while len(HUNG) < 2:
            job_id = await submit(rows, "hang")
            while len(HUNG) < 2 and not (await rows.job(job_id))["finished_at"]:
                await asyncio.sleep(0.02)


async def until(holds: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():
            await asyncio.sleep(0.02)


async def values(rows: Rows, job_id: UUID) -> dict[str, Any]:
    found = await rows.connection.fetch(
        "SELECT t.step, r.value FROM result r JOIN task t ON t.id = r.task_id WHERE t.job_id = $1", job_id
    )
    return {row["step"]: row["value"] for row in found}


@pytest.mark.usefixtures("worker")
async def test_a_plain_handler_reads_and_writes_in_a_thread_that_knows_whose_it_is(rows: Rows) -> None:
    for does in ("ok", "flaky"):
        job_id = await submit(rows, does)
        assert (await end_of(rows, job_id))["status"] == "succeeded"
        said = await values(rows, job_id)
        assert said["first"]["thread"].startswith("handler-")
        assert said["first"]["job_id"] == str(job_id)
        assert said["second"] == {"read": "hello", "first": str(job_id)}


@pytest.mark.usefixtures("worker")
async def test_a_plain_handler_past_its_time_limit_is_left_and_writes_nothing_any_more(rows: Rows) -> None:
    job_id = await submit(rows, "hang")
    row = await end_of(rows, job_id)
    assert (row["status"], row["error"]["code"]) == ("failed", "step_timeout")
    GO_ON.set()
    assert HUNG
    await until(lambda: ["cancelled"] * len(HUNG) == HEARD)  # two attempts, a thread each
    assert await rows.connection.fetchval("SELECT count(*) FROM output WHERE job_id = $1", job_id) == 0


@pytest.mark.usefixtures("worker")
async def test_a_plain_handler_hears_of_a_cancel_at_its_checkpoint(rows: Rows) -> None:
    job_id = await submit(rows, "work")
    await until(lambda: HEARD)
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="tests", by="tests")
    assert (await end_of(rows, job_id))["status"] == "cancelled"


@pytest.mark.usefixtures("worker")
async def test_a_plain_handler_that_exits_ends_its_attempt_and_not_the_worker(rows: Rows) -> None:
    row = await end_of(rows, await submit(rows, "exit"))
    assert row["error"]["code"] == "handler_error"
    assert (await end_of(rows, await submit(rows, "ok")))["status"] == "succeeded"


@pytest.mark.usefixtures("worker")
async def test_where_every_thread_is_stuck_a_further_step_snoozes_and_loses_no_attempt(rows: Rows) -> None:
    await hang_in_both_threads(rows)
    waiting = await submit(rows, "ok")
    snoozes = "SELECT status FROM task WHERE job_id = $1 AND step = 'first'"
    async with asyncio.timeout(SECONDS):
        while await rows.connection.fetchval(snoozes, waiting) != "waiting":
            await asyncio.sleep(0.05)
    GO_ON.set()
    assert (await end_of(rows, waiting))["status"] == "succeeded"
    assert await rows.connection.fetchval("SELECT max(errors + losses) FROM task WHERE job_id = $1", waiting) == 0


async def test_threads_that_are_stuck_are_named_and_most_of_them_retire_the_worker(
    rows: Rows, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck() -> float:
        samples = [one for family in metrics.STUCK_THREADS.collect() for one in family.samples]
        return sum(one.value for one in samples if one.labels["step"] == "first")

    monkeypatch.setattr(threads, "_STUCK_SECONDS", 0.0)
    with capture_logs() as lines:
        await hang_in_both_threads(rows)
        await until(lambda: stuck() == 2)
        assert worker.retired.is_set()
    told = [(line["step"], line["stuck"]) for line in lines if "runs on in its thread" in line["event"]]
    assert told == [("first", 1), ("first", 2)]
    GO_ON.set()
    await until(lambda: stuck() == 0)


@pytest.mark.usefixtures("worker")
async def test_a_handler_that_blocks_the_loop_is_named_once_and_measured_each_time(rows: Rows) -> None:
    def blocked() -> float:
        samples = [sample for family in metrics.BLOCKED.collect() for sample in family.samples]
        return sum(one.value for one in samples if one.name.endswith("_count") and one.labels["pipeline"] == "rude")

    before = blocked()
    with capture_logs() as lines:
        for _ in range(2):
            new = jobs.NewJob(rude, "t")
            await jobs.submit(rows.connection, [new])
            await end_of(rows, new.id)
    told = [line for line in lines if "blocked the event loop" in line["event"]]
    assert [(line["pipeline"], line["step"], line["seconds"] >= 0.3) for line in told] == [("rude", "only", True)]
    assert blocked() - before == 2
