"""What a child prints is in the worker's log, and cannot flood it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from threading import Lock

import pytest
import structlog

from leasehold.telemetry.attempt_logs import Recorder, record_in
from leasehold.worker.sandbox.child_output import MAX_BYTES_PER_RUN
from tests.worker.children.conftest import Pool, pool


@pytest.fixture
async def own(tmp_path: Path) -> AsyncIterator[Pool]:
    """Children of the test's own: closing them writes the rest of what they printed."""
    made = await pool(tmp_path)
    yield made
    await made.children.close()


async def test_a_line_is_logged_with_its_step(own: Pool) -> None:
    with structlog.testing.capture_logs() as logs:
        await own.act("prints", text="strange chunk at 17")
        await own.children.close()
    [entry] = [entry for entry in logs if entry.get("line") == "strange chunk at 17"]
    assert (entry["pipeline"], entry["step"]) == ("scripted", "act")
    assert isinstance(entry["child"], int)


async def test_a_flood_neither_blocks_the_step_nor_fills_the_log(own: Pool) -> None:
    with structlog.testing.capture_logs() as logs:
        await own.act("prints", text="x" * 999, times=20_000)
        await own.children.close()
    lines = [entry["line"] for entry in logs if entry["event"] == "child output"]
    assert sum(map(len, lines)) <= MAX_BYTES_PER_RUN
    [dropped] = [entry["bytes"] for entry in logs if entry["event"] == "child output dropped"]
    assert dropped > 19_000_000


async def test_one_endless_line_is_cut(own: Pool) -> None:
    with structlog.testing.capture_logs() as logs:
        await own.act("prints", text="y" * 1_000_000)
        await own.children.close()
    lines = [entry["line"] for entry in logs if entry["event"] == "child output"]
    assert lines
    assert max(map(len, lines)) <= 1000


async def test_a_new_run_has_a_new_allowance(own: Pool) -> None:
    with structlog.testing.capture_logs() as logs:
        await own.act("prints", text="x" * 999, times=1000)
        await own.act("prints", text="and now this")
        await own.children.close()
    assert "and now this" in [entry.get("line") for entry in logs]


async def test_the_job_says_where_something_that_was_printed_is_left_out(own: Pool) -> None:
    recorder = Recorder(100_000, 10_000_000, Lock())
    record_in(recorder)
    try:
        await own.act("prints", text="one\ntwo", end="")
        await own.act("prints", text="y" * 1500 + "\n" + "z" * 1000)
        await own.act("prints", text="x" * 999, times=1000)
    finally:
        record_in(None)
    lines = [json.loads(line) for line in recorder.take()[1]]
    texts = [line["message"] for line in lines]
    assert texts[:4] == ["one", "two", "y" * 994 + " [...]", "z" * 1000]
    assert lines[-1]["level"] == "warning"
    assert texts[-1] == f"Output of this run that is not kept: {1_000_000 - MAX_BYTES_PER_RUN:,} bytes."
