"""What handlers log is kept with their job, by a worker in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.db import log_reads
from leasehold.db.log_reads import LogFilter
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline
from leasehold.settings import Settings
from leasehold.transitions import jobs, logs, settlements, streams, sweeps
from leasehold.transitions.logs import LogChunk
from leasehold.transitions.settlements import Failure, Snoozing
from leasehold.transitions.streams import StreamChunk
from leasehold.worker.attempts.log_and_stream import LogAndStreamWriters
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.worker import logging_steps
from tests.worker.conftest import SECONDS, end_of
from tests.worker.logging_steps import apart, hanging, patient, pipelines, plain, talking

LIMIT = 300


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Nothing sets up logs in a test: so the loggers say themselves what is kept."""
    names = ("shop", "tests.worker.logging_steps", "leasehold.child")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.INFO)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
async def worker(settings: Settings, tmp_path: Path) -> AsyncIterator[Worker]:
    changes: dict[str, Any] = {
        "poll_seconds": 0.1,
        "work_dir": str(tmp_path),
        "worker_children": 1,
        "job_log_lines": LIMIT,
        "stream_chunks": 10,
        "loop_blocked_seconds": 60.0,  # its warning is a line, too, and a busy machine blocks the loop
        "pipelines": "tests.worker.logging_steps:pipelines",
    }
    async with Worker(settings.model_copy(update=changes), pipelines()) as running:
        yield running


async def begin(rows: Rows, pipeline: Pipeline, does: str = "ok") -> UUID:
    new = jobs.NewJob(pipeline, "t", params={"does": does})
    await jobs.submit(rows.connection, [new])
    return new.id


async def lines_of(rows: Rows, job_id: UUID, wanted: LogFilter | None = None) -> list[dict[str, Any]]:
    return await log_reads.log_page(rows.connection, "t", job_id, 0, wanted or LogFilter(), 10_000)


async def lines_after(rows: Rows, pipeline: Pipeline, does: str = "ok") -> list[dict[str, Any]]:
    """Of a job that does so, once it has ended."""
    job_id = await begin(rows, pipeline, does)
    await end_of(rows, job_id)
    return await lines_of(rows, job_id)


def writers_of(worker: Worker) -> Any:
    return worker.parts.runner._log_and_stream_writers


async def test_an_attempt_that_ends_by_an_error_of_the_worker_gives_its_lease_back(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the heartbeat would renew the lease until the time limit of the step, and nobody would run it."""
    failed = asyncio.Event()

    async def fail(_buffers: Any) -> None:
        failed.set()
        raise RuntimeError("the rest cannot be written")

    monkeypatch.setattr(writers_of(worker), "finish", fail)
    await begin(rows, talking)
    async with asyncio.timeout(SECONDS):
        await failed.wait()
        while worker.parts.runner._heartbeat.all_held():
            await asyncio.sleep(0.02)


def heads(lines: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(line["level"], line["logger"], line["message"]) for line in lines]


BEGINNING = [
    ("info", "shop", "attempt 1 begins"),
    ("info", "tests.worker.logging_steps", "to its own logger"),
    ("warning", "shop", "in a thread"),
]


async def test_the_lines_of_a_handler_are_kept_in_their_order(worker: Worker, rows: Rows) -> None:
    lines = await lines_after(rows, talking)
    assert heads(lines) == BEGINNING
    assert lines[1]["fields"] == {"hats": 2}
    assert [line["n"] for line in lines] == [1, 2, 3]
    assert {(line["step"], line["attempt"], line["epoch"]) for line in lines} == {("talk", 1, 1)}


async def test_a_job_that_logs_nothing_costs_no_statement_and_no_row(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []
    batchers = [writer._batcher for writer in (writers_of(worker).logs, writers_of(worker).streams)]
    write = batchers[0]._statement

    async def counted(connection: Any, chunks: Any, repeated: bool) -> Any:
        written.append(chunks)
        return await write(connection, chunks, repeated)

    made: list[object] = []
    make = writers_of(worker).make

    def noted(claimed: Any) -> Any:
        made.append(claimed)
        return make(claimed)

    monkeypatch.setattr(writers_of(worker), "make", noted)
    for batcher in batchers:
        monkeypatch.setattr(batcher, "_statement", counted)
    assert await lines_after(rows, talking, "nothing") == []
    assert written == []
    assert made == []
    assert await rows.connection.fetchval("SELECT count(*) FROM tail") == 0
    assert await lines_after(rows, talking)
    assert len(written) >= 1


@pytest.mark.parametrize(
    ("does", "message", "frame", "attempts"),
    [
        ("fail", "no_hats: there are none", "raise Permanent(", 1),
        ("bug", "handler_error: ZeroDivisionError: no hats", "buy_a_hat", 2),
        ("hang", "step_timeout: the step ran longer than 5 s", "the_hat_maker", 1),
    ],
)
async def test_a_failed_attempt_keeps_its_lines_and_its_traceback(
    worker: Worker, rows: Rows, does: str, message: str, frame: str, attempts: int
) -> None:
    lines = await lines_after(rows, hanging if does == "hang" else talking, does)
    assert len(lines) == attempts * (len(BEGINNING) + 1)
    assert heads(lines)[: len(BEGINNING)] == BEGINNING
    failure = lines[len(BEGINNING)]
    assert (failure["level"], failure["logger"], failure["message"]) == ("error", "leasehold", message)
    assert frame in failure["traceback"]
    assert "attempts/runner.py" not in failure["traceback"]
    assert [line["attempt"] for line in lines if "traceback" in line] == list(range(1, attempts + 1))


async def test_lines_are_found_by_step_and_attempt(worker: Worker, rows: Rows) -> None:
    job_id = await begin(rows, talking, "flaky")
    await end_of(rows, job_id)
    second = await lines_of(rows, job_id, LogFilter(attempt=2))
    assert second[0]["message"] == "attempt 2 begins"
    assert {line["attempt"] for line in second} == {2}
    assert len(await lines_of(rows, job_id, LogFilter(step="talk"))) == len(second) * 2 + 1
    assert await lines_of(rows, job_id, LogFilter(step="other")) == []
    pages, after = [], 0
    while page := await log_reads.log_page(rows.connection, "t", job_id, after, LogFilter(), 2):
        pages += page
        after = page[-1]["n"]
    assert pages == await lines_of(rows, job_id)
    assert await log_reads.log_page(rows.connection, "somebody else", job_id, 0, LogFilter(), 10) == []


async def test_a_plain_handler_is_heard_in_its_thread(worker: Worker, rows: Rows) -> None:
    lines = await lines_after(rows, plain)
    assert heads(lines)[:2] == [
        ("info", "shop", "in the worker's thread"),
        ("info", "tests.worker.logging_steps", "to its own logger"),
    ]
    assert "buy_a_hat" in lines[2]["traceback"]


async def test_lines_are_kept_while_the_attempt_runs(worker: Worker, rows: Rows) -> None:
    """So those of a worker that is killed are there, up to the last write."""
    go_on = asyncio.Event()
    logging_steps.GO_ON.append(go_on)
    job_id = await begin(rows, patient, "wait")
    try:
        async with asyncio.timeout(SECONDS):
            while len(await lines_of(rows, job_id)) < len(BEGINNING):
                await asyncio.sleep(0.02)
    finally:
        go_on.set()
    await end_of(rows, job_id)
    assert heads(await lines_of(rows, job_id)) == BEGINNING


async def test_what_asyncio_reports_of_others_is_no_line_of_the_attempt_in_which_the_collector_ran(
    worker: Worker, rows: Rows
) -> None:
    assert heads(await lines_after(rows, talking, "collect")) == BEGINNING


async def test_too_many_lines_are_cut_and_the_log_says_so(worker: Worker, rows: Rows) -> None:
    lines = await lines_after(rows, talking, "chatty")
    assert len(lines) == LIMIT + 2
    assert lines[LIMIT]["message"].startswith("The log is cut here: an attempt keeps 300 lines")
    assert lines[-1]["message"] == f"Lines of this attempt that are not kept: {5000 + len(BEGINNING) - LIMIT:,}."


async def test_a_child_is_heard_and_so_is_what_it_prints(worker: Worker, rows: Rows) -> None:
    lines = await lines_after(rows, apart)
    by_step = {step: heads([line for line in lines if line["step"] == step]) for step in ("first", "second")}
    assert sorted(by_step["first"]) == [("info", "output", "printed"), ("info", "shop", "a child works")]
    assert by_step["second"] == [("info", "shop", "another child works")]  # it ran speculatively


@pytest.mark.parametrize(("does", "word"), [("bug", "buy_a_hat"), ("fail", "raise Permanent(")])
async def test_a_childs_failure_has_its_traceback(worker: Worker, rows: Rows, does: str, word: str) -> None:
    lines = await lines_after(rows, apart, does)
    assert word in lines[-1]["traceback"]
    assert ("info", "shop", "a child works") in heads(lines)


async def test_a_child_that_dies_leaves_its_last_lines(worker: Worker, rows: Rows) -> None:
    lines = await lines_after(rows, apart, "die")
    assert ("warning", "shop", "it dies") in heads(lines)
    assert lines[-1]["message"].startswith("child_crashed: ")


async def test_a_chunk_that_is_written_twice_is_there_once_and_goes_with_its_job(rows: Rows) -> None:
    """The answer to the first may have been lost. Chunks of a job that is gone are dropped."""
    (hint,) = await rows.submit()
    task_id = hint.hint.task_id
    job_id = (await rows.task(task_id))["job_id"]
    tenant_id = (await rows.job(job_id))["tenant_id"]
    line = b'{"at":"2026-11-22T12:00:00+00:00","level":"info","logger":"shop","message":"one"}'
    chunks = [LogChunk(task_id, 1, 1, 1, [line, line]), LogChunk(task_id, 1, 1, 3, [line])]
    for _ in range(2):
        await logs.append(rows.connection, chunks)
    read = await log_reads.log_page(rows.connection, tenant_id, job_id, 0, LogFilter(), 100)
    assert [line["n"] for line in read] == [1, 2, 3]
    await rows.connection.execute(
        "UPDATE job SET status = 'succeeded', finished_at = now(), steps_left = 0,"
        " expires_at = now() - interval '1 day' WHERE id = $1",
        job_id,
    )
    await sweeps.forget_jobs(rows.connection, [job_id])
    assert await rows.connection.fetchval("SELECT count(*) FROM job_log") == 0
    assert await rows.connection.fetchval("SELECT count(*) FROM tail") == 0
    await logs.append(rows.connection, chunks)
    assert await rows.connection.fetchval("SELECT count(*) FROM job_log") == 0


async def test_a_log_that_postgresql_refuses_fails_no_attempt(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_connection: Any, _chunks: Any, _repeated: bool) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(writers_of(worker).logs._batcher, "_statement", refuse)
    job_id = await begin(rows, talking)
    assert (await end_of(rows, job_id))["status"] == "succeeded"
    assert await lines_of(rows, job_id) == []


async def test_many_attempts_at_once_keep_all_their_lines(worker: Worker, rows: Rows) -> None:
    new = [jobs.NewJob(talking, "t", params={"does": "ok"}) for _ in range(100)]
    await jobs.submit(rows.connection, new)
    async with asyncio.timeout(SECONDS):
        while await rows.connection.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL"):
            await asyncio.sleep(0.05)
    for job in new:
        assert heads(await lines_of(rows, job.id)) == BEGINNING


# --- streams


async def chunks_after(rows: Rows, pipeline: Pipeline, does: str = "ok") -> list[dict[str, Any]]:
    """Of a job that does so, once it has ended."""
    job_id = await begin(rows, pipeline, does)
    await end_of(rows, job_id)
    return await log_reads.stream_page(rows.connection, "t", job_id, 0, LogFilter(), 10_000)


async def test_an_attempt_that_runs_again_begins_its_stream_again_and_one_that_snoozed_does_not(
    worker: Worker, rows: Rows
) -> None:
    chunks = await chunks_after(rows, talking, "emit")
    assert [(chunk["attempt"], chunk["chunk"]) for chunk in chunks] == [
        *((1, f"1.{number}") for number in range(3)),
        *((2, f"2.{number}") for number in range(3)),
        *((2, f"again.{number}") for number in range(3)),
    ]
    assert [chunk["superseded"] for chunk in chunks] == [True] * 3 + [False] * 6
    assert [chunk["restarts"] for chunk in chunks] == [False] * 3 + [True] + [False] * 5
    assert [chunk["n"] for chunk in chunks] == list(range(1, 10))


async def test_a_later_attempt_whose_first_chunk_postgresql_refused_begins_its_stream_again(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk of the attempt says so. With the first one alone it was lost that the earlier attempt's are void."""
    writers = LogAndStreamWriters(settings)
    write = writers.streams._batcher._statement

    async def refuse(_connection: Any, _chunks: Any, _repeated: bool) -> Any:
        raise ValueError("no")

    async def emitted(stream: Any, *chunks: str, by: Any = write) -> None:
        monkeypatch.setattr(writers.streams._batcher, "_statement", by)
        for chunk in chunks:
            assert stream.buffer.emit(chunk)
            writers.streams._begin_write(stream)
            await stream.writing

    writers.streams.start()
    try:
        claimed = await rows.leased()
        await emitted(writers.make(claimed)[0], "old")
        await settlements.release(rows.connection, [claimed.lease])
        (claimed,) = await rows.claim_all()
        stream = writers.make(claimed)[0]
        await emitted(stream, "refused", by=refuse)
        await emitted(stream, "new", "er")
    finally:
        await writers.streams.close()
    job = await rows.job(claimed.job_id)
    chunks = await log_reads.stream_page(rows.connection, job["tenant_id"], claimed.job_id, 0, LogFilter(), 100)
    assert [(chunk["chunk"], chunk["superseded"], chunk["restarts"]) for chunk in chunks] == [
        ("old", True, False), ("new", False, True), ("er", False, False)
    ]  # fmt: skip


async def test_a_stream_that_grows_too_long_is_cut_and_its_attempt_hears_of_it(worker: Worker, rows: Rows) -> None:
    chunks = await chunks_after(rows, plain, "emit")
    assert [chunk["chunk"] for chunk in chunks[:10]] == [{"number": number} for number in range(10)]
    assert [("cut" in chunk, "chunk" in chunk) for chunk in chunks[10:]] == [(True, False)]
    result = await rows.connection.fetchval("SELECT value FROM result")
    assert result == {"fits": [True] * 10 + [False] * 2}


async def test_children_emit_also_those_that_began_early(worker: Worker, rows: Rows) -> None:
    chunks = await chunks_after(rows, apart)
    assert [(chunk["step"], chunk["chunk"]) for chunk in chunks] == [
        ("first", "from a child"),
        ("second", ["from another"]),
    ]


async def test_a_snooze_does_not_hide_that_an_attempt_before_it_has_failed(rows: Rows) -> None:
    """It emitted nothing: the next attempt went on with the stream of the failed one."""
    claimed = await rows.leased()
    chunk = StreamChunk(claimed.lease, 1, [b'{"chunk":1}'], restarts=False)
    await streams.append(rows.connection, [chunk])
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "bad", "no", True, 0.0)])
    (claimed,) = await rows.claim_all()
    for _ in range(3):
        await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 0.0)])
        (claimed,) = await rows.claim_all()
        assert claimed.previous_state == "waiting"
        if claimed.lease.epoch > 3:  # the attempt of epoch 3 snoozes without a chunk, too
            for first in (1, 2):
                await streams.append(rows.connection, [replace(chunk, lease=claimed.lease, first=first)])
    stored = await rows.connection.fetch("SELECT epoch, first, restarts FROM job_stream ORDER BY last")
    assert [tuple(row) for row in stored] == [
        (1, 1, False), (4, 1, True), (4, 2, True), (5, 1, False), (5, 2, False),
    ]  # fmt: skip


async def test_an_attempt_after_a_failure_begins_the_stream_of_its_own_step_again(rows: Rows) -> None:
    """Whatever another step has emitted in an attempt of the same number, after a failure of its own."""
    (failed, chunk), (beside, _) = [
        (claimed, StreamChunk(claimed.lease, 1, [b'{"chunk":1}'], restarts=False))
        for claimed in (await rows.leased(), await rows.leased())
    ]
    await streams.append(rows.connection, [chunk])
    failures = [Failure(one.lease, "error", "bad", "no", True, 0.0) for one in (failed, beside)]
    await settlements.fail(rows.connection, failures)
    again = {claimed.job_id: claimed.lease for claimed in await rows.claim_all()}
    for job_id in (beside.job_id, failed.job_id):
        await streams.append(rows.connection, [replace(chunk, lease=again[job_id])])
    stored = await rows.connection.fetch("SELECT task_id, epoch, restarts FROM job_stream")
    assert {tuple(row) for row in stored} == {
        (failed.lease.task_id, 1, False), (failed.lease.task_id, 2, True), (beside.lease.task_id, 2, False),
    }  # fmt: skip


async def test_an_attempt_without_its_lease_emits_nothing(rows: Rows) -> None:
    claimed = await rows.leased()
    chunk = StreamChunk(claimed.lease, 1, [b'{"chunk":1}'], restarts=False)
    zombie = replace(claimed.lease, epoch=claimed.lease.epoch - 1)
    stranger = replace(claimed.lease, owner=new_id())
    await streams.append(rows.connection, [replace(chunk, lease=zombie), replace(chunk, lease=stranger)])
    assert await rows.connection.fetchval("SELECT count(*) FROM job_stream") == 0
    for _ in range(2):  # the answer to the first may have been lost
        await streams.append(rows.connection, [chunk])
    assert await rows.connection.fetchval("SELECT count(*) FROM job_stream") == 1
    await settlements.release(rows.connection, [claimed.lease])
    await streams.append(rows.connection, [replace(chunk, first=2)])
    assert await rows.connection.fetchval("SELECT count(*) FROM job_stream") == 1
