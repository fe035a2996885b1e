"""What nobody foresaw in an isolated step is tried twice, seconds apart, and then fails with its traceback."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker.conftest import end_of
from tests.worker.isolated_steps import faulty, pipelines


@pytest.fixture
async def worker(settings: Settings, tmp_path: Path) -> AsyncIterator[Worker]:
    changes: dict[str, Any] = {
        "poll_seconds": 0.1,
        "work_dir": str(tmp_path),
        "worker_children": 1,
        "pipelines": "tests.worker.isolated_steps:pipelines",
    }
    async with Worker(settings.model_copy(update=changes), pipelines()) as running:
        yield running


async def failures(rows: Rows, new: jobs.NewJob) -> list[tuple[str, bool]]:
    said = await rows.connection.fetch(
        "SELECT code, retryable FROM failure JOIN task ON task.id = task_id WHERE job_id = $1 ORDER BY failure.epoch",
        new.id,
    )
    return [(row["code"], row["retryable"]) for row in said]


async def test_it_fails_within_seconds_after_two_attempts_and_the_log_has_both_tracebacks(
    worker: Worker, rows: Rows
) -> None:
    new = jobs.NewJob(faulty, "t")
    began = time.monotonic()
    with structlog.testing.capture_logs() as logs:
        await jobs.submit(rows.connection, [new])
        job = await end_of(rows, new.id)
    assert time.monotonic() - began < 30  # the ladder's first rung is half a minute at least
    assert (job["status"], job["error"]["code"]) == ("failed", "handler_error")
    assert await failures(rows, new) == [("handler_error", True), ("handler_error", False)]
    told = [entry["traceback"] for entry in logs if entry["event"] == "handler raised"]
    assert len(told) == 2
    assert all("raise_something" in traceback and "ZeroDivisionError" in traceback for traceback in told)
    assert "Traceback" not in job["error"]["message"]


async def test_an_error_that_was_foreseen_before_does_not_take_its_second_attempt(worker: Worker, rows: Rows) -> None:
    for busy_seconds in (8, 20, 40):  # a busy machine may begin the first attempt later than that
        new = jobs.NewJob(faulty, "t", params={"busy_until": time.time() + busy_seconds})
        await jobs.submit(rows.connection, [new])
        assert (await end_of(rows, new.id))["status"] == "failed"
        codes = [code for code, _ in await failures(rows, new)]
        if codes[0] == "busy":
            break
    assert codes[0] == "busy"
    assert codes[-2:] == ["handler_error", "handler_error"]
    assert codes.count("handler_error") == 2
