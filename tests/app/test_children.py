"""`process=True` and `isolated=True`: functions in processes of their own, killed with all that they started."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold import App, DeclarationError, TaskFailed
from leasehold.app.process_frames import CallOfProcess, FailedInProcess, Kind
from leasehold.app.processes import Process
from leasehold.db import log_reads
from leasehold.db.database import Connection
from leasehold.db.log_reads import LogFilter
from leasehold.domain.errors import ChildCrashed
from leasehold.domain.ids import new_id
from leasehold.domain.result_limits import ResultLimits
from leasehold.worker.attempts import runner
from leasehold.worker.sandbox.children import NoneForked
from tests.app import child_tasks
from tests.app.conftest import Serve

SECONDS = 120.0
SOURCE = "tests.app.child_tasks:app"


@pytest.fixture
async def served(using: Callable[..., App], serve: Serve) -> AsyncIterator[None]:
    using(child_tasks.app)
    changes: dict[str, Any] = {"pipelines": SOURCE, "worker_children": 2}
    async with serve(child_tasks.app, **changes), asyncio.timeout(SECONDS):
        yield


@pytest.fixture
def informed() -> Iterator[None]:
    """The worker takes the lines that its children log at `info`, too."""
    log = logging.getLogger("leasehold.child")
    level_before = log.level
    log.setLevel(logging.INFO)
    yield
    log.setLevel(level_before)


async def lines_of_code(connection: Connection, run_id: UUID) -> list[dict[str, Any]]:
    """What the code of the run logged. On a busy machine the platform adds a warning: that the loop stood still."""
    lines = await log_reads.log_page(connection, "me", run_id, 0, LogFilter(), 100)
    return [dict(line) for line in lines if not line["logger"].startswith("leasehold.")]


async def test_a_process_runs_one_call_after_another_and_is_not_the_worker(served: None) -> None:
    first = await (await child_tasks.add.asubmit(1, 2))
    assert first[0] == 3
    assert first[1] != os.getpid()
    assert await (await child_tasks.add.asubmit(3, 4)) == [7, first[1], 1]
    results = [await run for run in await child_tasks.add.asubmit_many([child_tasks.add.call(n, n) for n in range(6)])]
    assert [result[0] for result in results] == [0, 2, 4, 6, 8, 10]
    assert len({result[1] for result in results}) <= 2
    assert await (await child_tasks.large.asubmit(3_000_000)) == "x" * 3_000_000


ENDS = {
    "permanent": ("no_such_thing", "never was", 1),
    "key": ("handler_error", "KeyError: 'it'", 1),
    "value": ("handler_error", "ValueError: it", 2),
    "killed": ("child_crashed", "killed by SIGKILL", 2),
    "killed by a signal without a name": ("child_crashed", "killed by signal 35", 2),
    "exits": ("handler_error", "SystemExit: 3", 2),
    "odd file name": ("handler_error", "FileNotFoundError: no file ?", 2),
    "no text": ("handler_error", "Speechless: its message cannot be read", 2),
}


async def test_what_ends_a_process_ends_the_attempt_with_its_code(served: None, connection: Connection) -> None:
    for kind, (code, sentence, attempts) in ENDS.items():
        run = await child_tasks.fail.asubmit(kind)
        with pytest.raises(TaskFailed) as failed:
            await run
        assert (kind, failed.value.code) == (kind, code)
        assert sentence in failed.value.message
        assert await connection.fetchval("SELECT attempt FROM task WHERE job_id = $1", run.id) == attempts, kind
    assert (await (await child_tasks.add.asubmit(1, 2)))[0] == 3  # another process serves the next call


#: The module that a task's process runs. The worker starts other processes, too, such as that of its evaluator.
PROGRAM = "leasehold.app.process_child"


async def test_a_run_for_which_no_process_can_be_started_is_put_off_and_charged_with_nothing(
    served: None, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = 0
    start_process = asyncio.create_subprocess_exec

    async def start_later(*arguments: Any, **options: Any) -> Any:
        nonlocal refusals
        if not refusals and PROGRAM in arguments:
            refusals += 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start_process(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_later)
    monkeypatch.setattr(runner, "_NO_CHILD_SECONDS", 0.01)
    run = await child_tasks.add.asubmit(1, 2)
    assert (await run)[0] == 3
    assert refusals == 1
    assert await connection.fetchval("SELECT attempt FROM task WHERE job_id = $1", run.id) == 1
    assert await connection.fetchval("SELECT count(*) FROM failure") == 0


@pytest.mark.parametrize("how", ["does not start", "dies while it is idle"])
async def test_a_run_whose_process_dies_before_it_begins_is_put_off_and_charged_with_nothing(
    served: None, connection: Connection, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The machine has killed it, for example. It lost an attempt as `child_crashed`."""
    broken: list[int] = []
    start_process = asyncio.create_subprocess_exec

    async def start_broken(*arguments: Any, **options: Any) -> Any:
        if broken or PROGRAM not in arguments:
            return await start_process(*arguments, **options)
        broken.append(0)
        return await start_process("false", **options)

    if how == "does not start":
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_broken)
    else:  # and the worker has not noticed it yet
        broken.append((await (await child_tasks.add.asubmit(0, 0)))[1])
        monkeypatch.setattr(Process, "lives", True)
        os.kill(broken[0], signal.SIGKILL)
    monkeypatch.setattr(runner, "_NO_CHILD_SECONDS", 0.01)
    run = await child_tasks.add.asubmit(1, 2)
    assert (await run)[0] == 3
    assert len(broken) == 1
    charged = "SELECT errors, crashes, losses, epoch FROM task WHERE job_id = $1"
    assert tuple(await connection.fetchrow(charged, run.id) or ()) == (0, 0, 0, 2)
    assert await connection.fetchval("SELECT count(*) FROM failure") == 0


async def test_a_directory_that_cannot_be_deleted_costs_no_result(served: None) -> None:
    assert await (await child_tasks.replace_directory.asubmit()) == "done"


async def test_the_files_of_a_killed_process_are_deleted_from_the_work_directory(served: None, tmp_path: Path) -> None:
    """Each left its files in the system's folder for temporary files, for ever."""
    note = tmp_path / "note"
    with pytest.raises(TaskFailed, match="killed by SIGKILL"):
        await (await child_tasks.die_with_files.asubmit(str(note)))
    directory = Path(note.read_text())
    assert directory.is_relative_to(tmp_path)
    assert not await asyncio.to_thread(directory.exists)


async def test_the_time_limit_kills_a_process_and_what_it_started(served: None, tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    for _ in range(5):  # on a busy machine its time may be over before its program runs
        with pytest.raises(TaskFailed, match="step_timeout"):
            await (await child_tasks.hang_with_a_child.asubmit(str(alive)))
        if alive.exists():
            break
    assert alive.exists()
    written = alive.read_text()
    await asyncio.sleep(0.3)
    assert alive.read_text() == written


async def test_a_cancel_stops_the_function_at_its_next_checkpoint(served: None, connection: Connection) -> None:
    run = await child_tasks.stop_when_asked.asubmit()
    while await connection.fetchval("SELECT count(*) FROM progress WHERE summary = 'looping'") == 0:
        await asyncio.sleep(0.05)
    await run.acancel("enough")
    with pytest.raises(TaskFailed, match="cancelled: enough"):
        await run.aresult(timeout=25)  # the grace alone would be 30 s


async def test_a_strict_model_reads_its_arguments_from_json_in_any_process(served: None) -> None:
    event = child_tasks.Event(at=datetime(2026, 3, 29, 2, 30, tzinfo=UTC), key=uuid4())
    for task in (child_tasks.event_in_a_process, child_tasks.event_in_the_sandbox):
        assert await (await task.asubmit(event)) == "2026-03-29T02:30:00+00:00 4"
        assert await asyncio.to_thread(task.local, event) == "2026-03-29T02:30:00+00:00 4"


async def test_an_odd_report_of_progress_ends_no_attempt(served: None) -> None:
    assert await (await child_tasks.report_oddly.asubmit()) == "done"


async def test_an_isolated_task_runs_in_the_sandbox(served: None) -> None:
    assert await (await child_tasks.shout.asubmit("hello")) == "HELLO"
    assert await (await child_tasks.shout_much.asubmit(100_000)) == "X" * 100_000


async def test_the_settings_of_results_hold_for_tasks_in_processes_of_their_own(
    using: Callable[..., App], serve: Serve, connection: Connection
) -> None:
    using(child_tasks.app)
    changes = {"pipelines": SOURCE, "worker_children": 2, "result_inline_bytes": 1000, "result_max_bytes": 5000}
    async with serve(child_tasks.app, **changes), asyncio.timeout(SECONDS):
        for task in (child_tasks.large, child_tasks.shout_much):
            for size, kept in ((998, "value"), (999, "output")):  # a text has two quotes
                run = await task.asubmit(size)
                assert len(await run) == size
                value = await connection.fetchval(
                    "SELECT r.value FROM result r JOIN task t ON t.id = r.task_id WHERE t.job_id = $1", run.id
                )
                assert (task.name, list(value)) == (task.name, [kept])
            with pytest.raises(TaskFailed, match="the result has 5001 bytes of JSON; at most 5000 are stored"):
                await (await task.asubmit(4999))


async def test_without_a_store_the_largest_inline_result_of_an_isolated_task_is_kept(
    using: Callable[..., App], serve: Serve
) -> None:
    using(child_tasks.app)
    size = 1024 * 1024
    changes = {"pipelines": SOURCE, "worker_children": 1, "result_inline_bytes": size, "object_store": "none"}
    async with serve(child_tasks.app, **changes), asyncio.timeout(SECONDS):
        assert len(await (await child_tasks.shout_much.asubmit(size - 2))) == size - 2
        with pytest.raises(TaskFailed, match=f"without an object store at most {size} are stored"):
            await (await child_tasks.shout_much.asubmit(size))


async def test_a_process_sends_no_result_that_nothing_keeps(tmp_path: Path) -> None:
    process = await Process.start()
    try:
        call = CallOfProcess(
            module=child_tasks.__name__, task="children.large", params={"size": 100}, job_id=str(new_id()),
            task_id=str(new_id()), tenant="me", number=1, directory=str(tmp_path),
            result_limits=ResultLimits(10, 50, has_store=True),
        )  # fmt: skip
        async with asyncio.timeout(SECONDS):
            kind, body = await process.call(call, lambda _kind, _body: None)
    finally:
        await process.kill()
    assert kind is Kind.FAILED
    assert FailedInProcess.model_validate_json(body).code == "result_too_large"


def test_what_no_process_could_run_is_refused_at_import() -> None:
    app = App("shop")

    async def in_the_loop() -> None: ...
    def nested() -> None: ...

    for options, function, words in (
        ({"process": True}, in_the_loop, "async def runs in the worker's loop"),
        ({"isolated": True}, in_the_loop, "async def runs in the worker's loop"),
        ({"process": True, "isolated": True}, nested, "choose"),
        ({"process": True}, nested, "declare it at module level"),
    ):
        with pytest.raises(DeclarationError, match=r"test_children\.py:\d+: .*" + words):
            app.task(**options)(function)  # type: ignore[call-overload]  # one of several


def test_a_queue_is_isolated_or_it_is_not() -> None:
    app = App("shop")
    app.task(name="one", queue="mixed")(_one)
    with pytest.raises(DeclarationError, match=r"shop\.two and shop\.one"):
        app.task(name="two", queue="mixed", isolated=True)(_two)


def _one() -> None: ...
def _two() -> None: ...


async def test_what_children_log_and_emit_is_kept_with_the_run(
    served: None, connection: Connection, informed: None
) -> None:
    run = await child_tasks.talk.asubmit(True)
    with pytest.raises(TaskFailed):
        await run
    lines = await lines_of_code(connection, run.id)
    assert [(line["logger"], line["message"]) for line in lines[:2]] == [
        ("shop", "in a process"),
        ("children.talk", "to its own logger"),
    ]
    assert (lines[2]["level"], "KeyError: 'hats'" in lines[2]["traceback"]) == ("error", True)
    sandboxed = await child_tasks.talk_in_the_sandbox.asubmit()
    await sandboxed
    lines = await lines_of_code(connection, sandboxed.id)
    assert [(line["logger"], line["message"]) for line in lines] == [("shop", "in the sandbox")]
    fields = lines[0]["fields"]
    assert (fields["price"], fields["buyer"], fields["long"]) == (3, "{'a': 1}", "x" * 2000)
    assert "27" in fields  # the worker adds the id of the child's process
    assert not {"__class__", "28"} & fields.keys()
    asked = await child_tasks.ask_in_the_sandbox.asubmit()
    sentence = "an isolated task does not know its {}: give it what it needs as an argument"
    assert await asked == ["None", *(sentence.format(member) for member in ("run_id", "tenant", "number"))]
    (line,) = await lines_of_code(connection, asked.id)
    assert (line["logger"], line["message"]) == ("children.ask_in_the_sandbox", "to its own logger")
    for one in (run, sandboxed):
        chunks = await log_reads.stream_page(connection, "me", one.id, 0, LogFilter(), 100)
        assert [chunk["chunk"] for chunk in chunks] == ["a chunk"]


async def test_the_fields_of_what_a_process_logs_are_kept_with_the_run(
    served: None, connection: Connection, informed: None
) -> None:
    run = await child_tasks.talk_with_fields.asubmit()
    await run
    (line,) = await lines_of_code(connection, run.id)
    expected = {"price": 3, "weight": None, "is_new": True, "buyer": "{'a': 1}", "odd": "?", "child": "mine"}
    assert line["fields"] == expected


async def test_what_a_process_logs_by_structlog_is_kept_with_the_run(
    served: None, connection: Connection, informed: None
) -> None:
    run = await child_tasks.talk_by_structlog.asubmit()
    await run
    sold, failed = await lines_of_code(connection, run.id)
    assert (sold["level"], sold["logger"], sold["message"]) == ("info", "shop", "event=sold hats=2")
    assert failed["level"] == "error"
    assert "KeyError: 'hats'" in failed["message"]


async def test_what_a_thread_that_an_earlier_call_left_behind_says_is_kept_with_no_other_run(
    served: None, connection: Connection, informed: None
) -> None:
    """The process serves all tenants: it could be another tenant's run."""
    first = await child_tasks.leave_a_thread.asubmit("secret")
    second = await child_tasks.talk_beside_the_thread.asubmit() if await first else None
    assert second is not None
    assert await second == await first  # the same process
    lines = await lines_of_code(connection, second.id)
    assert [(line["logger"], line["message"]) for line in lines] == [("shop", "of this call")]
    assert await log_reads.stream_page(connection, "me", second.id, 0, LogFilter(), 100) == []


async def test_what_a_pool_says_for_a_call_is_kept_with_its_run_also_where_the_pool_is_older(
    served: None, connection: Connection, informed: None
) -> None:
    """And what it still says for an earlier call is kept with no run: it could be another tenant's."""
    first = await child_tasks.leave_work_in_a_pool.asubmit()
    process = await first
    second = await child_tasks.talk_in_the_pool.asubmit()
    assert await second == process
    for run, messages in ((first, ["first"]), (second, ["second", "third"])):
        lines = await lines_of_code(connection, run.id)
        assert [line["message"] for line in lines] == messages


@pytest.mark.parametrize("kind", ["before", "killed"])
async def test_a_process_that_dies_has_begun_if_the_code_of_the_task_runs(tmp_path: Path, kind: str) -> None:
    process = await Process.start()
    call = CallOfProcess(
        module=child_tasks.__name__, task="children.fail", params={"kind": kind}, job_id=str(new_id()),
        task_id=str(new_id()), tenant="me", number=1, directory=str(tmp_path),
        result_limits=ResultLimits(10, 50, has_store=True),
    )  # fmt: skip
    if kind == "before":
        os.kill(process.pid, signal.SIGKILL)
    try:
        with pytest.raises(NoneForked if kind == "before" else ChildCrashed, match="killed by SIGKILL"):
            await asyncio.wait_for(process.call(call, lambda _kind, _body: None), SECONDS)
    finally:
        await process.kill()


async def test_a_call_gets_no_frame_of_an_earlier_call(tmp_path: Path) -> None:
    process = await Process.start()
    frames: list[tuple[Kind, bytes]] = []
    calls: list[tuple[str, dict[str, str]]] = [("leave_a_thread", {"secret": "s"}), ("talk_beside_the_thread", {})]
    try:
        async with asyncio.timeout(SECONDS):
            for name, params in calls:
                call = CallOfProcess(
                    module=child_tasks.__name__, task=f"children.{name}", params=params, job_id=str(new_id()),
                    task_id=str(new_id()), tenant="me", number=1, directory=str(tmp_path),
                    result_limits=ResultLimits(10, 50, has_store=True), log_level=logging.INFO,
                )  # fmt: skip
                kind, _ = await process.call(call, lambda kind, body: frames.append((kind, body)))
                assert kind is Kind.DONE
    finally:
        await process.kill()
    assert [(kind, b"of this call" in body) for kind, body in frames] == [(Kind.LOG, True)]
