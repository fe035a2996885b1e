"""A worker's start: inline queues wait for nobody's handlers, isolated ones for the fences around theirs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from leasehold.db import run_reads
from leasehold.db.database import Connection, connect, connected, make_pool
from leasehold.domain.errors import DeclarationError
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.exporter.jobs import OUTCOMES
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.claims import Claimed
from leasehold.transitions.endings import JobEnded
from leasehold.worker import parts
from leasehold.worker.leases import registration
from leasehold.worker.leases.orphans import release_unlocked
from leasehold.worker.leases.registration import Registration
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.support.now import now
from tests.worker import late_handlers
from tests.worker.conftest import SECONDS, end_of


def starting(settings: Settings, tmp_path: Path, which: str) -> Worker:
    own = {"work_dir": str(tmp_path), "worker_children": 1, "poll_seconds": 0.1, "drain_seconds": 10.0}
    source = f"tests.worker.late_handlers:{which}"
    return Worker(settings.model_copy(update=own | {"pipelines": source}), late_handlers.pipelines())


async def registered(rows: Rows, worker: UUID) -> set[str]:
    return set(await rows.connection.fetchval("SELECT queues FROM worker WHERE id = $1", worker))


async def test_inline_queues_are_served_while_the_handlers_of_isolated_ones_load(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    isolated, inline = (jobs.NewJob(one, "t") for one in (late_handlers.isolated, late_handlers.inline))
    await jobs.submit(rows.connection, [isolated])
    await jobs.submit(rows.connection, [inline])
    async with starting(settings, tmp_path, "when_allowed") as worker:
        assert worker.queues == {"late-inline", "operations"}
        assert await registered(rows, worker.id) == {"late-inline", "operations"}
        assert (await end_of(rows, inline.id))["status"] == "succeeded"
        assert worker.queues == {"late-inline", "operations"}
        assert (await rows.job(isolated.id))["started_at"] is None
        assert not now(worker.health.is_ready)  # a rollout waits for the isolated queues, too
        (tmp_path / late_handlers.MAY_LOAD).touch()
        await worker.complete.wait()
        assert now(worker.health.is_ready)
        assert worker.queues == {"late-inline", "late-isolated", "operations"}
        assert await registered(rows, worker.id) == worker.queues
        assert (await end_of(rows, isolated.id))["status"] == "succeeded"
        await worker.drain()
        assert not worker.health.is_ready


async def test_a_signal_ends_a_worker_that_still_waits_for_its_database() -> None:
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = f"postgresql://nobody:secret@127.0.0.1:{port}/none"
    async with server:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "leasehold.worker", env={**os.environ, "LEASEHOLD_DATABASE_URL": url},
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                await connected.wait()
                process.terminate()
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()


async def test_isolated_queues_whose_handlers_load_while_the_worker_registers_are_served_too(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the worker has chosen the queues that it serves at once, and before it asks whether others come later."""
    loaded = asyncio.Event()
    warm, registering = parts._servable_queues, registration.registered

    async def warm_and_say(*arguments: Any) -> Any:
        try:
            return await warm(*arguments)
        finally:
            loaded.set()

    @asynccontextmanager
    async def registered_late(*arguments: Any) -> AsyncIterator[Registration]:
        await loaded.wait()
        async with registering(*arguments) as made:
            yield made

    monkeypatch.setattr(parts, "_servable_queues", warm_and_say)
    monkeypatch.setattr(parts, "registered", registered_late)
    job = jobs.NewJob(late_handlers.isolated, "t")
    await jobs.submit(rows.connection, [job])
    async with starting(settings, tmp_path, "late") as worker:
        assert (await end_of(rows, job.id))["status"] == "succeeded"
        assert worker.queues == {"late-inline", "late-isolated", "operations"}


async def test_an_isolated_step_in_a_queue_of_before_waits_for_a_worker_with_its_children(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    """A release moved the step to another queue. A worker that serves only the old queue has no children for it."""
    before = Pipeline("late_isolated", module="", steps=[Step("act", queue="late-inline", isolated=True)])
    job = jobs.NewJob(before, "t")
    await jobs.submit(rows.connection, [job])
    task_id = await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1", job.id)
    only_inline = settings.model_copy(update={"worker_queues": "late-inline"})
    async with starting(only_inline, tmp_path / "one", "pipelines") as worker:
        async with asyncio.timeout(SECONDS):
            while (task := await rows.task(task_id))["status"] in ("pending", "running"):
                await asyncio.sleep(0.02)
        assert (task["status"], task["errors"]) == ("waiting", 0)
        handlers = await rows.connection.fetchval("SELECT handlers FROM worker WHERE id = $1", worker.id)
        assert "late_inline.act" in handlers  # and those of modules that another test has loaded in this process
        assert "late_isolated.act" not in handlers
    async with starting(settings, tmp_path / "all", "pipelines"):
        assert (await end_of(rows, job.id))["status"] == "succeeded"


async def test_a_drain_that_begins_while_later_queues_are_recorded_ends(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, go_on = asyncio.Event(), asyncio.Event()
    change = Registration.change

    async def change_late(*arguments: Any) -> None:
        recording.set()
        await go_on.wait()
        await change(*arguments)

    monkeypatch.setattr(Registration, "change", change_late)
    async with starting(settings, tmp_path, "late") as worker:
        await asyncio.wait_for(recording.wait(), 60)
        draining = asyncio.create_task(worker.drain())
        await asyncio.sleep(0.1)
        go_on.set()
        await asyncio.wait_for(draining, 60)
        await worker.complete.wait()
        assert "late-isolated" not in worker.queues


async def test_queues_that_come_later_are_recorded_once_the_table_is_there_again(
    settings: Settings, rows: Rows
) -> None:
    """A migration may be under way. The worker would end otherwise, with all that it runs."""
    worker = rows.terms.owner
    async with make_pool(settings, "test", 2) as pool:
        registration = Registration(worker, ["early"])
        await registration.write(rows.connection)
        await rows.connection.execute("ALTER TABLE worker RENAME TO worker_of_tomorrow")
        changing = asyncio.create_task(registration.change(pool, ["early", "late"], None))
        done, _ = await asyncio.wait([changing], timeout=0.5)
        assert done == set()
        await rows.connection.execute("ALTER TABLE worker_of_tomorrow RENAME TO worker")
        await asyncio.wait_for(changing, 60)
    assert await registered(rows, worker) == {"early", "late"}


async def test_handlers_that_do_not_load_end_the_worker_but_not_what_it_runs(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    """Else one that is started again and again would lose an attempt of somebody's each time."""
    long = jobs.NewJob(late_handlers.inline, "t", params={"long": True})
    await jobs.submit(rows.connection, [long])
    async with starting(settings, tmp_path, "unfit") as worker:
        async with asyncio.timeout(60):
            while (await rows.job(long.id))["started_at"] is None:
                await asyncio.sleep(0.02)
        (tmp_path / late_handlers.MAY_LOAD).touch()
        with pytest.raises(DeclarationError, match="a library is missing"):
            async with asyncio.timeout(60):
                await worker.failed()
        assert worker.queues == {"late-inline", "operations"}
        ended = await rows.job(long.id)
        assert ended["status"] == "succeeded"
    assert await rows.connection.fetchval("SELECT max(attempt) FROM task WHERE job_id = $1", long.id) == 1


async def test_a_worker_that_drains_counts_no_more_as_one_that_serves(
    settings: Settings, tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last attempts may run for an hour. Meanwhile nobody would hear that no other worker serves the queue."""
    ended = asyncio.Event()

    async def serving() -> dict[str, int]:
        queues = await run_reads.queues(rows.connection, settings.silent_seconds)
        return {row["queue"]: row["workers"] for row in queues}

    async with starting(settings, tmp_path, "pipelines") as worker:
        assert (await serving())["late-inline"] == 1
        monkeypatch.setattr(worker.parts.slot_pools, "finished", ended.wait)
        draining = asyncio.create_task(worker.drain())
        async with asyncio.timeout(60):
            while "late-inline" in await serving():
                await asyncio.sleep(0.02)
        assert not draining.done()
        ended.set()
        await draining
        (row,) = await run_reads.workers(rows.connection, settings.silent_seconds)
        assert (row["draining"], row["silent"]) == (True, False)


async def test_a_drain_ends_although_the_workers_row_cannot_be_written(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    async with starting(settings, tmp_path, "pipelines") as worker, rows.connection.transaction():
        await rows.connection.execute("SELECT FROM worker WHERE id = $1 FOR UPDATE", worker.id)
        await asyncio.wait_for(worker.drain(), 60)


async def test_a_worker_that_ends_at_once_gives_back_the_tasks_that_it_runs(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    """As after a second signal."""
    long = jobs.NewJob(late_handlers.inline, "t", params={"long": True})
    await jobs.submit(rows.connection, [long])
    async with starting(settings, tmp_path, "pipelines"), asyncio.timeout(60):
        while (await rows.job(long.id))["started_at"] is None:
            await asyncio.sleep(0.02)
    task = await rows.task(await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1", long.id))
    assert (task["status"], task["attempt"], task["losses"]) == ("pending", 0, 0)
    async with starting(settings, tmp_path, "pipelines"):
        assert (await end_of(rows, long.id))["status"] == "succeeded"


async def test_at_the_end_of_a_worker_only_its_own_tasks_are_given_back_and_those_of_cancelled_jobs_end(
    settings: Settings, rows: Rows
) -> None:
    running, cancelled = await rows.leased(), await rows.leased()
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="r", by="b")
    of_another = await Rows(rows.connection).leased()
    async with make_pool(settings, "test", 2) as pool:
        async with registration.registered(pool, Registration(rows.terms.owner, ["default"])):
            pass
        assert await rows.connection.fetchval("SELECT count(*) FROM worker") == 0
    states = [(await rows.task(claimed.lease.task_id))["status"] for claimed in (running, cancelled, of_another)]
    assert states == ["pending", "cancelled", "running"]
    assert (await rows.job(cancelled.job_id))["status"] == "cancelled"


async def test_a_job_that_ends_with_its_worker_is_counted(settings: Settings, rows: Rows) -> None:
    """An alert compares the outcomes. The job is being cancelled, and its last attempt ends with the worker."""
    await rows.leased()
    cancelled = await rows.leased()
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="r", by="b")
    counter = OUTCOMES.labels("cancelled")
    before = counter.value
    async with (
        make_pool(settings, "test", 2) as pool,
        registration.registered(pool, Registration(rows.terms.owner, ["default"])),
    ):
        pass
    assert (await rows.job(cancelled.job_id))["status"] == "cancelled"
    assert counter.value == before + 1


async def test_a_worker_that_ends_pauses_before_it_tries_again_to_release_a_locked_task(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL would answer thousands of queries meanwhile, of each worker that ends."""
    tries: list[set[UUID]] = []

    async def note_and_release(
        connection: Connection, worker: UUID, tasks: Mapping[UUID, int]
    ) -> tuple[dict[UUID, int], list[JobEnded]]:
        tries.append(set(tasks))
        return await release_unlocked(connection, worker, tasks)

    monkeypatch.setattr(registration, "release_unlocked", note_and_release)
    monkeypatch.setattr(registration, "_LOCKED_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(registration, "_RELEASE_SECONDS", 0.5)
    locked, free = (await rows.leased()).lease, (await rows.leased()).lease
    async with connected(settings, "test") as other, other.transaction(), make_pool(settings, "test", 2) as pool:
        await other.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", locked.task_id)
        async with registration.registered(pool, Registration(rows.terms.owner, ["default"])):
            pass
    assert tries == [{locked.task_id, free.task_id}]


async def test_a_task_whose_job_is_locked_for_a_moment_at_the_end_of_its_worker_is_given_back_too(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_RELEASE_SECONDS", SECONDS)
    locked, free = await rows.leased(), await rows.leased()

    async def states() -> list[str]:
        return [(await rows.task(claimed.lease.task_id))["status"] for claimed in (locked, free)]

    other = await connect(settings, "test")
    async with make_pool(settings, "test", 2) as pool, AsyncExitStack() as stack:
        await stack.enter_async_context(registration.registered(pool, Registration(rows.terms.owner, ["default"])))
        async with other.transaction():
            await other.execute("SELECT 1 FROM job WHERE id = $1 FOR UPDATE", locked.job_id)
            ending = asyncio.create_task(stack.aclose())
            while await states() != ["running", "pending"]:
                await asyncio.sleep(0.02)
        await ending
    await other.close()
    assert await states() == ["pending", "pending"]
    assert await rows.connection.fetchval("SELECT count(*) FROM worker") == 0


async def test_a_step_that_a_late_settlement_gives_a_worker_at_its_end_is_given_back_too(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settlement may be under way in PostgreSQL, and claim the next step of its job."""
    late: list[Claimed] = []

    async def release_after_a_claim(
        connection: Connection, worker: UUID, tasks: Mapping[UUID, int]
    ) -> tuple[dict[UUID, int], list[JobEnded]]:
        if not late:
            late.append(await rows.leased())
        return await release_unlocked(connection, worker, tasks)

    monkeypatch.setattr(registration, "release_unlocked", release_after_a_claim)
    first = await rows.leased()
    async with (
        make_pool(settings, "test", 2) as pool,
        registration.registered(pool, Registration(rows.terms.owner, ["default"])),
    ):
        pass
    assert [(await rows.task(one.lease.task_id))["status"] for one in (first, *late)] == ["pending", "pending"]
    assert await rows.connection.fetchval("SELECT count(*) FROM worker") == 0


async def test_a_worker_that_is_told_to_drain_while_it_starts_takes_no_more(
    settings: Settings, tmp_path: Path, rows: Rows
) -> None:
    async with starting(settings, tmp_path, "when_allowed") as worker:
        await worker.drain()
        (tmp_path / late_handlers.MAY_LOAD).touch()
        await worker.complete.wait()
        isolated = jobs.NewJob(late_handlers.isolated, "t")
        await jobs.submit(rows.connection, [isolated])
        await asyncio.sleep(0.3)
        assert worker.queues == {"late-inline", "operations"}
        assert (await rows.job(isolated.id))["started_at"] is None
