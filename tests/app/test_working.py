"""A worker runs an app's tasks: functions in threads and in the loop, their results, retries and lifespan."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from uuid import UUID

import pytest
from pydantic import BaseModel, ConfigDict

from leasehold import App, Batch, Context, Retry, current
from leasehold.app import processes
from leasehold.db.database import Connection
from leasehold.domain.errors import LeaseLost, ObjectExists, Retryable
from leasehold.settings import Settings
from leasehold.transitions.jobs import NewJob, submit
from leasehold.worker.attempts import inline
from leasehold.worker.worker import Worker

SECONDS = 60.0
QUICK = Retry(times=2, delay=timedelta(seconds=0.05), never=(KeyError, Retryable))
ERRORS: dict[str, Callable[[str], Exception]] = {
    "key": KeyError, "value": ValueError, "mine": lambda message: Retryable(message, code="mine")
}  # fmt: skip
app = App("shop")
events: list[str] = []


class Order(BaseModel):
    id: int


@app.lifespan
async def opened() -> AsyncIterator[str]:
    events.append("open")
    yield "client"
    events.append("closed")


@app.task
def thread_of(order: Order, *, times: int = 1) -> str:
    attempt = current()
    attempt.progress(50, "half")
    return (
        f"{order.id * times} {attempt.state} {threading.current_thread() is threading.main_thread()} {attempt.number}"
    )


@app.task
async def loop_of(order: Order) -> list[str]:
    return [str(current().run_id), str(threading.current_thread() is threading.main_thread())]


@app.task
def nothing() -> None: ...


class Event(BaseModel):
    model_config = ConfigDict(strict=True)
    at: datetime
    kind: Literal["party"]
    guests: set[str]


@app.task
def event_in_a_thread(event: Event) -> str:
    return f"{event.at.isoformat()} {event.guests}"


@app.task
async def event_in_the_loop(event: Event) -> str:
    return f"{event.at.isoformat()} {event.guests}"


#: The numbers of the functions that block now, and what lets them go on.
blocked: set[int] = set()
go_on = threading.Event()


@app.task
def block(number: int, gate: str = "") -> None:
    blocked.add(number)
    assert go_on.wait(5 * SECONDS)


@app.workflow
async def call_block(ctx: Context, number: int, gate: str) -> None:
    await ctx.call(go_on.wait, 5 * SECONDS)


@app.task(process=True)
def block_in_process(number: int, gate: str) -> None:
    with Path(gate).open("rb", buffering=0) as opened:
        assert opened.read(1) == b"x"


@app.task
async def much(size: int) -> str:
    return "x" * size


@app.task
def much_in_a_thread(size: int) -> str:
    return "x" * size


@app.task(retry=QUICK)
def fail(kind: str) -> None:
    raise ERRORS[kind](f"attempt {current().number}")


@app.task(retry=QUICK)
async def fail_in_the_loop(kind: str) -> None:
    raise ERRORS[kind](f"attempt {current().number}")


@app.task
def unserialisable() -> Any:
    return object()


@pytest.fixture
async def worker(settings: Settings, tmp_path: Path) -> AsyncIterator[Worker]:
    changes = {"work_dir": str(tmp_path), "poll_seconds": 0.05, "result_max_bytes": 200_000}
    async with Worker(settings.model_copy(update=changes), app.pipelines()) as worker:
        yield worker


async def run(connection: Connection, task: Any, *args: Any, **kwargs: Any) -> tuple[UUID, dict[str, Any], Any]:
    """The job, its row and its step's value, once it has ended."""
    job = NewJob(task.pipeline, tenant_id="me", params=task.arguments.encoded(args, kwargs))
    await submit(connection, [job])
    async with asyncio.timeout(SECONDS):
        while True:
            row = await connection.fetchrow(
                "SELECT j.status, j.error, r.value, t.attempt FROM job j JOIN task t ON t.job_id = j.id"
                " LEFT JOIN result r ON r.task_id = t.id WHERE j.id = $1",
                job.id,
            )
            assert row is not None
            if row["status"] in ("succeeded", "failed"):
                return job.id, dict(row), row["value"]
            await asyncio.sleep(0.02)


async def test_a_plain_function_runs_in_a_thread_and_an_async_one_in_the_loop(
    worker: Worker, connection: Connection
) -> None:
    _, _, value = await run(connection, thread_of, Order(id=4), times=2)
    assert value == {"value": "8 client False 1"}
    job_id, _, value = await run(connection, loop_of, Order(id=4))
    assert value == {"value": [str(job_id), "True"]}
    _, row, value = await run(connection, nothing)
    assert (row["status"], value) == ("succeeded", {"value": None})


@pytest.mark.parametrize("threads", [200, 16], ids=["each has a thread", "most wait for a thread"])
async def test_two_hundred_functions_that_block_at_once_do_not_keep_an_async_one(
    settings: Settings, connection: Connection, tmp_path: Path, threads: int
) -> None:
    """It ends while all of them block. Nothing but the test lets them go on. The worker has a slot for each."""
    blocked.clear()
    go_on.clear()
    blocking = [NewJob(block.pipeline, tenant_id="me", params=block.arguments.encoded((n,), {})) for n in range(200)]
    changes: dict[str, Any] = {"work_dir": str(tmp_path), "poll_seconds": 0.05}
    changes |= {"worker_threads": threads, "worker_concurrency": 256}
    ended = "SELECT count(*) FROM job WHERE finished_at IS NOT NULL AND id = ANY($1::uuid[])"
    ids = [job.id for job in blocking]
    async with Worker(settings.model_copy(update=changes), app.pipelines()):
        try:
            await submit(connection, blocking)
            async with asyncio.timeout(SECONDS):
                while len(blocked) < threads:
                    await asyncio.sleep(0.02)
            _, row, _ = await run(connection, loop_of, Order(id=4))
            assert row["status"] == "succeeded"
            assert (await connection.fetchval(ended, ids), len(blocked)) == (0, threads)
        finally:
            go_on.set()
        async with asyncio.timeout(SECONDS):
            while await connection.fetchval(ended, ids) < len(ids):
                await asyncio.sleep(0.02)
    assert blocked == set(range(200))


@pytest.mark.parametrize("way", [block, call_block, block_in_process], ids=["handler", "ctx.call", "process"])
async def test_at_default_sizes_functions_that_wait_for_a_thread_do_not_keep_the_slots_from_an_async_one(
    settings: Settings, connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    """No function gives up waiting, and none ends: only a slot that is lent lets the async one run."""
    monkeypatch.setattr(inline, "_ROOM_SECONDS", 3600.0)
    monkeypatch.setattr(processes, "WAIT_SECONDS", 3600.0)
    blocked.clear()
    go_on.clear()
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    jobs = [NewJob(way.pipeline, tenant_id="me", params=way.arguments.encoded((n, str(gate)), {})) for n in range(200)]
    ids = [job.id for job in jobs]
    claimed = "SELECT count(*) FROM task WHERE status = 'running' AND job_id = ANY($1::uuid[])"
    ended = "SELECT count(*) FROM job WHERE finished_at IS NOT NULL AND id = ANY($1::uuid[])"
    async with Worker(settings.model_copy(update={"work_dir": str(tmp_path / "work")}), app.pipelines()):
        try:
            await submit(connection, jobs)
            async with asyncio.timeout(SECONDS):
                while await connection.fetchval(claimed, ids) <= settings.worker_concurrency:
                    await asyncio.sleep(0.02)
            _, row, _ = await run(connection, loop_of, Order(id=4))
            assert row["status"] == "succeeded"
            assert await connection.fetchval(ended, ids) == 0
        finally:
            go_on.set()
            opened = os.open(gate, os.O_RDWR)  # those that wait to read it read an end once it is closed
        os.write(opened, b"x" * 400)
        async with asyncio.timeout(SECONDS):
            while await connection.fetchval(ended, ids) < len(ids):
                await asyncio.sleep(0.02)
        os.close(opened)
    assert await connection.fetchval("SELECT count(*) FROM job WHERE status <> 'succeeded'") == 0
    assert await connection.fetchval("SELECT max(attempt) FROM task") == 1


async def test_the_lifespan_is_entered_once_for_all_tasks_and_left_at_the_end(
    settings: Settings, tmp_path: Path
) -> None:
    events.clear()
    changes = {"work_dir": str(tmp_path), "poll_seconds": 0.05}
    async with Worker(settings.model_copy(update=changes), app.pipelines()):
        assert events == ["open"]
    assert events == ["open", "closed"]


@pytest.mark.parametrize("task", [much, much_in_a_thread])
async def test_a_large_result_goes_to_the_store_and_a_larger_one_fails_the_run(
    worker: Worker, connection: Connection, task: Any
) -> None:
    _, _, value = await run(connection, task, 65_534)  # with its quotes 64 KiB
    assert value == {"value": "x" * 65_534}
    job_id, _, value = await run(connection, task, 65_535)
    assert value == {"output": "result.json"}
    size = await connection.fetchval("SELECT size FROM output WHERE job_id = $1 AND name = 'result.json'", job_id)
    assert size == 65_537
    _, row, value = await run(connection, task, 200_001)
    assert (row["status"], row["error"]["code"], row["attempt"], value) == ("failed", "result_too_large", 1, None)


@pytest.mark.parametrize("task", [event_in_a_thread, event_in_the_loop])
async def test_a_strict_model_reads_its_arguments_from_json(worker: Worker, connection: Connection, task: Any) -> None:
    event = Event(at=datetime(2026, 3, 29, 2, 30, tzinfo=UTC), kind="party", guests={"anna"})
    _, row, value = await run(connection, task, event)
    assert (row["status"], value) == ("succeeded", {"value": "2026-03-29T02:30:00+00:00 {'anna'}"})


@pytest.mark.parametrize("task", [fail, fail_in_the_loop])
async def test_a_failed_attempt_is_tried_again_as_often_as_declared_and_never_after_what_never_names(
    worker: Worker, connection: Connection, task: Any
) -> None:
    _, row, _ = await run(connection, task, "value")
    assert (row["status"], row["attempt"]) == ("failed", 3)
    assert row["error"]["message"] == "ValueError: attempt 3"
    _, row, _ = await run(connection, task, "key")
    assert (row["status"], row["attempt"], row["error"]["code"]) == ("failed", 1, "handler_error")
    assert row["error"]["message"] == "KeyError: 'attempt 1'"
    _, row, _ = await run(connection, task, "mine")
    assert (row["status"], row["attempt"], row["error"]["code"]) == ("failed", 1, "mine")
    assert row["error"]["message"] == "attempt 1"


@pytest.mark.parametrize("error", [LeaseLost(), ObjectExists("key")])
@pytest.mark.parametrize("kind", ["in a thread", "in the loop", "in a batch"])
async def test_an_attempt_that_another_has_overtaken_ends_no_run_whatever_never_names(
    kind: str, error: Exception
) -> None:
    """An attempt whose checkpoint raised LeaseLost must settle nothing: its lease may be valid for seconds yet."""
    never = Retry(never=(Exception,))
    own = App("own")

    def raises() -> None:
        raise error

    async def raises_in_the_loop() -> None:
        raise error

    async def raises_in_a_batch(numbers: list[int]) -> list[int]:
        raise error

    match kind:
        case "in a thread":
            task: Any = own.task(retry=never)(raises)
        case "in the loop":
            task = own.task(retry=never)(raises_in_the_loop)
        case _:
            task = own.task(retry=never, batch=Batch(size=2))(raises_in_a_batch)
    params = task.arguments.model.model_validate(task.arguments.encoded([1] if "batch" in kind else [], {}))
    attempt = SimpleNamespace(number=2, params=params, call=lambda function: function())
    handler = task.pipeline.handlers["run"]
    with pytest.raises(type(error)):
        await (asyncio.to_thread(handler, attempt) if kind == "in a thread" else handler(attempt))


async def test_a_result_without_json_fails_the_run_at_once(worker: Worker, connection: Connection) -> None:
    _, row, _ = await run(connection, unserialisable)
    assert (row["status"], row["attempt"], row["error"]["code"]) == ("failed", 1, "result_not_serialisable")
