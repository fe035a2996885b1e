"""A worker in this process: every way that an inline step can end, and what the rows say then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from prometheus_client.registry import Collector

from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.telemetry import dead_letters, traces
from leasehold.transitions import jobs, notes
from leasehold.transitions.settlements import Completion
from leasehold.worker import metrics
from leasehold.worker.leases.settlement_batcher import Answer, Settlement, SettlementBatcher
from leasehold.worker.worker import Worker
from tests.factories import Rows, assert_history
from tests.support.now import now
from tests.worker.conftest import SECONDS, end_of
from tests.worker.inline_steps import OPENED, hanging, pipelines, scripted, writing


@pytest.fixture
async def worker(settings: Settings, tmp_path: Path) -> AsyncIterator[Worker]:
    changes: dict[str, Any] = {
        "poll_seconds": 0.1,
        "work_dir": str(tmp_path),
        "pipelines": "tests.worker.inline_steps:pipelines",
    }
    async with Worker(settings.model_copy(update=changes), pipelines()) as running:
        yield running


async def ended(rows: Rows, does: str) -> dict[str, Any]:
    """Submit a job that does so, and wait for its end; the job's row."""
    new = jobs.NewJob(hanging if does == "hang" else scripted, "t", params={"does": does})
    await jobs.submit(rows.connection, [new])
    return await end_of(rows, new.id)


async def value_of(rows: Rows, job: dict[str, Any], step: str) -> Any:
    return await rows.connection.fetchval(
        "SELECT r.value FROM result r JOIN task t ON t.id = r.task_id WHERE t.job_id = $1 AND t.step = $2",
        job["id"],
        step,
    )


async def test_a_step_writes_an_output_that_the_next_one_reads(worker: Worker, rows: Rows) -> None:
    job = await ended(rows, "ok")
    assert job["status"] == "succeeded"
    assert await value_of(rows, job, "first") == {"attempt": 1}
    output = await rows.connection.fetchrow("SELECT key, size FROM output WHERE job_id = $1", job["id"])
    assert output is not None
    assert tuple(output) == (f"jobs/{job['id']}/output/greeting.txt", 5)


async def test_a_flaky_step_is_tried_again(worker: Worker, rows: Rows) -> None:
    job = await ended(rows, "flaky")
    assert job["status"] == "succeeded"
    assert await value_of(rows, job, "first") == {"attempt": 2}


async def test_what_a_pipeline_opens_is_open_once_for_a_worker_and_closed_when_it_stops(
    rows: Rows, settings: Settings, tmp_path: Path
) -> None:
    changes = {"poll_seconds": 0.1, "work_dir": str(tmp_path)}
    async with Worker(settings.model_copy(update=changes), pipelines()):
        job = await ended(rows, "share")
        await ended(rows, "share")
        assert OPENED[-1].users == 2
        assert not now(OPENED[-1].closed)
    assert OPENED[-1].closed
    assert job["status"] == "succeeded"


async def test_a_file_of_an_attempt_is_stored_and_its_directory_is_gone(worker: Worker, rows: Rows) -> None:
    job = await ended(rows, "share")
    assert await rows.connection.fetchval("SELECT size FROM output WHERE job_id = $1", job["id"]) == 5
    directory = Path((await value_of(rows, job, "first"))["directory"])
    assert directory.is_absolute()
    assert not await asyncio.to_thread(directory.exists)


async def test_a_snoozed_step_comes_again_with_its_note_and_loses_no_attempt(worker: Worker, rows: Rows) -> None:
    """Nor do the workers count that it has lost before: the snooze ended an attempt in good order."""
    new = jobs.NewJob(scripted, "t", params={"does": "snooze"})
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, [new])
        await rows.connection.execute("UPDATE task SET losses = 5 WHERE job_id = $1", new.id)
    job = await end_of(rows, new.id)
    assert job["status"] == "succeeded"
    assert await value_of(rows, job, "first") == {"seen": 1}
    query = "SELECT attempt, losses FROM task WHERE job_id = $1 AND step = 'first'"
    assert [tuple(row) for row in await rows.connection.fetch(query, new.id)] == [(1, 0)]


@pytest.mark.parametrize("does", ["snooze", "fan_out"])
async def test_what_a_step_wrote_before_it_snoozed_or_fanned_out_is_its_output(
    worker: Worker, rows: Rows, does: str
) -> None:
    new = jobs.NewJob(writing, "t", params={"does": does})
    await jobs.submit(rows.connection, [new])
    job = await end_of(rows, new.id)
    assert job["status"] == "succeeded", job["error"]
    assert await value_of(rows, job, "reader") == {"again.txt": "three", "kept.txt": "kept"}
    sizes = await rows.connection.fetch(
        "SELECT name, size, step, tenant_id FROM output WHERE job_id = $1 AND step = 'whole'", new.id
    )
    assert {tuple(row) for row in sizes} == {("again.txt", 5, "whole", "t"), ("kept.txt", 4, "whole", "t")}


async def test_each_part_of_a_fan_out_keeps_what_it_writes_under_the_name_that_all_use(
    worker: Worker, rows: Rows
) -> None:
    new = jobs.NewJob(writing, "t", params={"does": "fan_out"})
    await jobs.submit(rows.connection, [new])
    assert (await end_of(rows, new.id))["status"] == "succeeded"
    outputs = await rows.connection.fetch(
        "SELECT step, key, sha256 FROM output WHERE job_id = $1 AND name = 'page.txt' ORDER BY step", new.id
    )
    assert [row["step"] for row in outputs] == ["part.0", "part.1"]
    store = worker.parts.store
    pages = [await store.fetch_bytes(row["key"], sha256=row["sha256"], max_bytes=99) for row in outputs]
    assert pages == [b"page 1", b"page 2"]


async def test_the_metrics_count_the_parts_of_a_fan_out_under_the_name_of_their_step(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric has room for a few hundred labels: those of the parts would soon make all later ones `other`."""
    for metric in (metrics.ATTEMPTS, metrics.SECONDS, metrics.RETRIES, dead_letters.DEAD):
        monkeypatch.setattr(metric, "_children", {})
    spans: set[tuple[str, str]] = set()

    @contextmanager
    def recorded(name: str, *_arguments: Any, **attributes: Any) -> Iterator[traces.Span]:
        if "leasehold_step" in attributes:
            spans.add((name, attributes["leasehold_step"]))
        yield traces.Span()

    monkeypatch.setattr(traces, "span", recorded)
    new = jobs.NewJob(writing, "t", params={"does": "fan out what fails"})
    await jobs.submit(rows.connection, [new])
    assert (await end_of(rows, new.id))["error"]["step"] == "part.1"
    async with asyncio.timeout(SECONDS):
        while not steps_in(dead_letters.DEAD):  # counted after the commit
            await asyncio.sleep(0.01)
    assert steps_in(dead_letters.DEAD) == steps_in(metrics.RETRIES) == {"part"}
    assert steps_in(metrics.ATTEMPTS) == steps_in(metrics.SECONDS) == {"whole", "part"}
    assert spans == {("writing whole", "whole"), ("writing part", "part.0"), ("writing part", "part.1")}


def steps_in(metric: Collector) -> set[str]:
    """The values of the metric's label `step`."""
    return {sample.labels["step"] for family in metric.collect() for sample in family.samples}


async def test_what_an_attempt_remembers_is_known_to_the_next_and_its_value_to_the_next_step(
    worker: Worker, rows: Rows
) -> None:
    job = await ended(rows, "remember")
    assert job["status"] == "succeeded"
    assert await value_of(rows, job, "first") == {"tried": 1}
    assert await value_of(rows, job, "second") == {"said": {"tried": 1}, "nobody": None}


async def test_a_connection_that_breaks_while_an_attempt_remembers_costs_it_nothing(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember, breaks = notes.remember, iter([True])

    async def breaking(connection: Connection, lease: Lease, note: Mapping[str, Any]) -> None:
        await remember(connection, lease, note)
        if next(breaks, False):
            raise ConnectionResetError

    monkeypatch.setattr(notes, "remember", breaking)
    job = await ended(rows, "remember")
    codes = await rows.connection.fetch("SELECT DISTINCT code FROM failure")
    assert (job["status"], [row["code"] for row in codes]) == ("succeeded", ["flaky"])


@pytest.mark.parametrize(
    ("does", "code", "attempts"),
    [
        ("raise", "handler_error", 2),
        ("exit", "handler_error", 2),
        ("exit in a task", "handler_error", 2),
        ("close", "handler_error", 2),
        ("abort", "handler_error", 2),
        ("unprintable", "handler_error", 2),
        ("fill", "disk_full", 2),
        ("permanent", "hopeless", 1),
        ("long code", "".join(map(chr, range(0x4E00, 0x4E00 + 200))), 1),
        ("hang", "step_timeout", 2),
        ("await what was cancelled", "handler_error", 2),
        ("unstorable", "bad_output", 1),
        ("unstorable number", "bad_output", 1),
        ("not finite", "bad_output", 1),
        ("not finite in a note", "bad_output", 1),
        ("not finite in a snooze", "bad_output", 1),
        ("nonsense", "bad_answer", 1),
        ("a connection of its own", "bad_connection", 1),
        ("a session of SQLAlchemy", "bad_connection", 1),
    ],
)
async def test_a_step_that_cannot_succeed_fails_its_job_with_a_code(
    worker: Worker, rows: Rows, does: str, code: str, attempts: int
) -> None:
    job = await ended(rows, does)
    assert (job["status"], job["error"]["code"], job["error"]["step"]) == ("failed", code, "first")
    assert await rows.connection.fetchval("SELECT count(*) FROM failure") == attempts


async def test_the_error_says_where_a_value_is_not_finite(worker: Worker, rows: Rows) -> None:
    assert "at /losses/1/1" in (await ended(rows, "not finite"))["error"]["message"]


async def test_an_item_of_a_fan_out_may_be_null(worker: Worker, rows: Rows) -> None:
    new = jobs.NewJob(writing, "t", params={"does": "fan out nothing"})
    await jobs.submit(rows.connection, [new])
    job = await end_of(rows, new.id)
    assert job["status"] == "succeeded", job["error"]
    assert await value_of(rows, job, "part.0") == {"item": 1}
    assert await value_of(rows, job, "part.1") == {"item": None}


async def test_an_item_of_a_fan_out_that_is_not_finite_fails_the_job_at_once(worker: Worker, rows: Rows) -> None:
    new = jobs.NewJob(writing, "t", params={"does": "fan out what is not finite"})
    await jobs.submit(rows.connection, [new])
    job = await end_of(rows, new.id)
    assert (job["status"], job["error"]["code"]) == ("failed", "bad_output")
    assert "at /1:" in job["error"]["message"]


async def test_a_result_beyond_a_limit_of_postgresql_fails_its_job_at_once(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = SettlementBatcher.settle

    async def settle_within_the_limit(batcher: SettlementBatcher, settlement: Settlement) -> Answer:
        if isinstance(settlement, Completion):
            raise asyncpg.ProgramLimitExceededError("string too long to represent as jsonb string")
        return await settle(batcher, settlement)

    monkeypatch.setattr(SettlementBatcher, "settle", settle_within_the_limit)
    job = await ended(rows, "ok")
    assert (job["status"], job["error"]["code"]) == ("failed", "bad_output")
    assert "string too long" in job["error"]["message"]


@pytest.mark.parametrize(("does", "code"), [("ok", None), ("permanent", "hopeless"), ("unstorable", "bad_output")])
async def test_the_span_of_an_attempt_that_failed_has_its_code(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch, does: str, code: str | None
) -> None:
    """Also if PostgreSQL refused what the step returned."""
    codes: asyncio.Queue[str | None] = asyncio.Queue()

    class Recorded(traces.Span):
        code: str | None = None

        def mark_failed(self, code: str) -> None:
            self.code = code

    @contextmanager
    def recorded(name: str, *_arguments: Any, **_attributes: Any) -> Iterator[traces.Span]:
        yield (span := Recorded())
        if name == "scripted first":
            codes.put_nowait(span.code)

    monkeypatch.setattr(traces, "span", recorded)
    await ended(rows, does)
    async with asyncio.timeout(SECONDS):
        assert await codes.get() == code


async def test_parameters_that_do_not_fit_fail_the_job_at_once(worker: Worker, rows: Rows) -> None:
    new = jobs.NewJob(scripted, "t", params={"does": [1]})
    await jobs.submit(rows.connection, [new])
    async with asyncio.timeout(SECONDS):
        while not (row := await rows.job(new.id))["finished_at"]:
            await asyncio.sleep(0.02)
    assert row["error"]["code"] == "bad_params"


async def test_a_job_of_a_pipeline_unknown_here_is_left_for_a_worker_that_knows_it(worker: Worker, rows: Rows) -> None:
    (hint,) = await rows.submit()  # pipeline `one`, queue `default`
    async with asyncio.timeout(SECONDS):
        while (task := await rows.task(hint.hint.task_id))["status"] != "waiting":
            await asyncio.sleep(0.02)
    assert task["attempt"] == 0  # it costs no attempt
    assert (await rows.job(task["job_id"]))["status"] == "running"


async def test_pinned_work_is_done_by_a_worker_with_its_label_and_by_no_other(
    worker: Worker, rows: Rows, settings: Settings, tmp_path: Path
) -> None:
    pinned = jobs.NewJob(scripted, "t", params={"does": "ok"}, pin="south")
    await jobs.submit(rows.connection, [pinned])
    assert (await ended(rows, "ok"))["status"] == "succeeded"  # the worker without the label had its chance
    assert (await rows.job(pinned.id))["status"] == "queued"
    labelled = {"worker_labels": "south, north", "poll_seconds": 0.1, "work_dir": str(tmp_path / "labelled")}
    async with Worker(settings.model_copy(update=labelled), pipelines()) as second, asyncio.timeout(SECONDS):
        assert second.queues >= {"default", "default@south", "default@north"}
        while not (row := await rows.job(pinned.id))["finished_at"]:
            await asyncio.sleep(0.02)
    assert row["status"] == "succeeded"
    owners = await rows.connection.fetch("SELECT data FROM history WHERE job_id = $1 AND kind = 'claimed'", pinned.id)
    assert {row["data"]["worker"] for row in owners} == {str(second.id)}


async def test_many_jobs_at_once_each_run_once(worker: Worker, rows: Rows) -> None:
    new = [jobs.NewJob(scripted, "t", params={"does": "snooze"}) for _ in range(200)]
    await jobs.submit(rows.connection, new)
    async with asyncio.timeout(SECONDS):
        while await rows.connection.fetchval("SELECT count(*) FROM job WHERE finished_at IS NULL"):
            await asyncio.sleep(0.05)
    assert await rows.connection.fetchval("SELECT count(*) FROM history WHERE kind = 'completed'") == 400
    for one in new[::20]:
        await assert_history(rows, one.id)


async def test_while_a_settlement_is_on_its_way_nobody_takes_the_task_for_one_that_runs_here(
    worker: Worker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL may have committed it, and the task may be due again: its hint must wait for the answer."""
    runner = worker.parts.runner
    heartbeat, settle = runner._heartbeat, runner._settlements.settle
    seen: list[tuple[bool, bool, bool]] = []

    async def looking(settlement: Any) -> Any:
        task = settlement.lease.task_id
        async with asyncio.timeout(SECONDS):
            while not heartbeat.ownership_confirmed(elsewhere := new_id()):
                await asyncio.sleep(0.01)
        seen.append((heartbeat.holds(task), heartbeat.ownership_confirmed(task), heartbeat.holds(elsewhere)))
        return await settle(settlement)

    monkeypatch.setattr(runner._settlements, "settle", looking)
    assert (await ended(rows, "flaky"))["status"] == "succeeded"
    assert seen == [(True, False, False)] * 3  # a failure and two completions
