"""When children start, are replaced and end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from leasehold.domain.errors import ChildCrashed, DeclarationError
from leasehold.worker.sandbox import frames, zygote_process
from leasehold.worker.sandbox.child_output import ChildOutput
from leasehold.worker.sandbox.child_process import ChildProcess
from leasehold.worker.sandbox.children import Children
from leasehold.worker.sandbox.spares import SPARE_CHILDREN
from tests.worker.children.conftest import SOURCE, Pool, is_running, is_there, pool
from tests.worker.children.waiting import until

SECONDS = 60.0


@pytest.mark.parametrize(
    ("pipeline", "source", "reason"),
    [
        ("unhandled", SOURCE, "no handler in tests.scripted_steps for \\['nobody'\\]"),
        ("moduleless", SOURCE, "No module named 'tests.no_such_module'"),
        ("coroutine", SOURCE, "its handler must be a plain function"),
        ("nameless", SOURCE, "no pipeline is named 'nameless'"),
        ("scripted", "tests.no_such_source:pipelines", "No module named 'tests.no_such_source'"),
        ("scripted", "tests.scripted:no_such_name", "no_such_name"),
        ("scripted", "tests.worker.children.broken_sources:nothing", "gives a NoneType, not Pipelines"),
        ("scripted", "tests.worker.children.broken_sources:dies", "exit status 9"),
    ],
)
async def test_what_cannot_run_is_refused_at_start(tmp_path: Path, pipeline: str, source: str, reason: str) -> None:
    children = Children(2, pipelines=[pipeline], work_dir=tmp_path, source=source)
    with pytest.raises(DeclarationError, match=reason):
        await children.start()
    assert children.pids == frozenset()


async def test_a_start_that_fails_leaves_no_other_start_behind(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    children = Children(2, pipelines=["unhandled", "scripted"], work_dir=tmp_path, source=SOURCE)
    with pytest.raises(DeclarationError, match="no handler"):
        await children.start()
    assert children.pids == frozenset()
    assert not children.pipelines  # a worker whose children lack fences closes them, and runs no isolated step
    assert asyncio.all_tasks() <= before  # a task of others may have ended


async def test_steps_run_in_as_many_children_as_there_are(tmp_path: Path) -> None:
    made = await pool(tmp_path, size=2)
    first, second = made.directory(), made.directory()
    running = [asyncio.create_task(made.act("hang", directory=directory)) for directory in (first, second)]
    await until(lambda: (first / "started").exists() and (second / "started").exists(), "both hang at once")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await made.children.close()


async def test_a_cancelled_step_is_killed_and_the_pool_is_whole_again(one: Pool) -> None:
    directory = one.directory()
    task = asyncio.create_task(one.act("hang", directory=directory))
    await until((directory / "started").exists, "the step has started")
    (running,) = one.children._running
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not is_there(running.pid), "the child is gone")
    assert (await one.act("ok")).value is None


async def test_a_step_cancelled_while_it_waits_for_a_child_harms_nobody(one: Pool) -> None:
    directory = one.directory()
    running = asyncio.create_task(one.act("finish_when_told", directory=directory))
    await until((directory / "started").exists, "the step has started")
    waiting = asyncio.create_task(one.act("ok"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    (directory / "go").touch()
    await running
    assert one.children.free_slots == 1
    assert (await one.act("ok")).value is None


async def test_children_that_died_while_idle_cost_no_attempt(one: Pool) -> None:
    (spares,) = one.children._spares.values()
    await until(lambda: len(spares._idle) == SPARE_CHILDREN, "all wait")
    before = {child.pid for child in spares._idle}
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    while any(is_running(pid) for pid in before):  # the event loop has not heard of it when the next run comes
        time.sleep(0.001)  # noqa: ASYNC251 - that is the point
    assert await one.pid() not in before
    await until(lambda: not any(is_there(pid) for pid in before), "they are reaped")


async def test_a_zygote_that_died_is_replaced_with_its_children(one: Pool) -> None:
    (spares,) = one.children._spares.values()
    assert spares._zygote is not None
    before = {*spares.pids}
    os.kill(spares._zygote.pid, signal.SIGKILL)
    await until(lambda: not any(is_running(pid) for pid in before), "its children died with it")
    assert await one.pid() not in before


async def test_a_zygote_that_stands_still_is_replaced(one: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run would wait without end for a child, although its time limit counts from its start in the child."""
    patience = zygote_process._ANSWER_SECONDS
    monkeypatch.setattr(zygote_process, "_ANSWER_SECONDS", 1.0)
    (spares,) = one.children._spares.values()
    await until(lambda: len(spares._idle) == SPARE_CHILDREN, "all wait")
    stopped = spares._zygote
    os.kill(_zygote(one), signal.SIGSTOP)
    async with asyncio.timeout(SECONDS):
        assert (await one.act("ok")).value is None
        await until(lambda: spares._zygote is not stopped, "it is given up")
        monkeypatch.setattr(zygote_process, "_ANSWER_SECONDS", patience)  # the next one may take its time
        for _ in range(SPARE_CHILDREN + 1):
            assert (await one.act("ok")).value is None


async def test_a_fork_that_is_cancelled_while_its_zygote_dies_stays_cancelled(
    one: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the keeper of the spare children asks the dead zygote for ever, and waits for itself to stop."""
    (spares,) = one.children._spares.values()
    zygote = spares._zygote
    assert zygote is not None
    cancelled = asyncio.Event()

    async def refused() -> ChildProcess:
        await cancelled.wait()
        raise BrokenPipeError

    monkeypatch.setattr(zygote, "_fork", refused)
    forking = asyncio.create_task(zygote.fork())
    await asyncio.sleep(0)
    forking.cancel()
    asyncio.get_running_loop().call_soon(cancelled.set)
    with pytest.raises(asyncio.CancelledError):
        await forking


async def test_zygotes_that_die_again_and_again_leave_as_many_children_waiting(tmp_path: Path) -> None:
    made = await pool(tmp_path)
    (spares,) = made.children._spares.values()
    for _ in range(SPARE_CHILDREN):
        await until(lambda: len(spares._idle) == SPARE_CHILDREN, "all wait")
        assert (await made.act("ok")).value is None
        pids = spares.pids
        os.kill(_zygote(made), signal.SIGKILL)  # while the next fork is not hurried
        await until(lambda pids=pids: not pids & spares.pids, "it is replaced")  # type: ignore[misc]  # bound now
    await until(lambda: len(spares._idle) == SPARE_CHILDREN, "all wait")
    await made.children.close()


async def test_a_run_begins_when_the_one_before_has_ended_though_nobody_has_reaped_it(tmp_path: Path) -> None:
    made = await pool(tmp_path)
    (spares,) = made.children._spares.values()
    await until(lambda: len(spares._idle) == SPARE_CHILDREN, "all wait")
    os.kill(_zygote(made), signal.SIGSTOP)
    async with asyncio.timeout(60):
        for _ in range(SPARE_CHILDREN):
            assert (await made.act("ok")).value is None
    os.kill(_zygote(made), signal.SIGCONT)
    await made.children.close()


async def test_the_first_child_is_forked_at_once_and_others_without_haste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has just begun needs the cores for itself; a run that finds nobody waits for no pause."""
    monkeypatch.setattr("leasehold.worker.sandbox.spares._FORK_PAUSE_SECONDS", 600)
    made = await pool(tmp_path, size=2)
    (spares,) = made.children._spares.values()
    async with asyncio.timeout(SECONDS):
        for _ in range(3):
            assert (await made.act("ok")).value is None
    await until(lambda: len(spares._idle) == 1, "one waits")
    await made.children.close()


def _zygote(made: Pool) -> int:
    (spares,) = made.children._spares.values()
    assert spares._zygote is not None
    return spares._zygote.pid


async def test_a_zygotes_death_is_a_crash_of_the_step_that_runs(one: Pool) -> None:
    directory = one.directory()
    task = asyncio.create_task(one.act("hang", directory=directory))
    await until((directory / "started").exists, "the step has started")
    (spares,) = one.children._spares.values()
    assert spares._zygote is not None
    os.kill(spares._zygote.pid, signal.SIGKILL)
    with pytest.raises(ChildCrashed):
        await task
    assert (await one.act("ok")).value is None


async def test_threads_that_a_module_started_are_told_of(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        made = await pool(tmp_path, source="tests.worker.children.broken_sources:threaded")
    assert await made.value("ok", n=1) == {"n": 1}
    await made.children.close()
    assert [entry["threads"] for entry in logs if "started threads" in entry["event"]] == [1]


async def test_closing_kills_what_runs_and_leaves_no_process(tmp_path: Path) -> None:
    made = await pool(tmp_path, size=3)
    directory = made.directory()
    task = asyncio.create_task(made.act("hang", directory=directory))
    await until((directory / "started").exists, "the step has started")
    pids = made.children.pids
    assert len(pids) >= 2  # the zygote, the one that runs, and those that wait
    await made.children.close()
    with pytest.raises(ChildCrashed):
        await task
    assert not [pid for pid in pids if is_there(pid)]


async def test_closing_while_a_replacement_warms_up_leaves_no_process(tmp_path: Path) -> None:
    others = _children_of(os.getpid())
    made = await pool(tmp_path, size=1)
    with pytest.raises(ChildCrashed):
        await made.act("segfault")
    await made.children.close()
    assert _children_of(os.getpid()) == others


def _open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _children_of(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_bytes().rpartition(b")")[2].split()
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"leasehold.worker.sandbox.zygote" in command:
            found.add(int(stat.parent.name))
    return found


async def test_the_pool_works_on_the_other_event_loop(tmp_path: Path) -> None:
    """A worker on uvloop: the same verdicts, deaths, fences and cancellations."""
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.worker.children.uvloop_worker", str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    printed, _ = await worker.communicate()
    assert json.loads(printed.splitlines()[-1]) == {
        "value": {"n": 1},
        "crash": "SIGSEGV",
        "timeout": "step_timeout",
        "cancelled": True,
        "descriptors": ["/dev/null", "pipe", "pipe", "socket"],
        "left": [],
    }
    assert worker.returncode == 0


@pytest.mark.parametrize("state", ["idle", "running"])
async def test_children_die_with_a_worker_that_is_killed(tmp_path: Path, state: str) -> None:
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.worker.children.doomed_worker", str(tmp_path), state,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert worker.stdout is not None
    pids = [int(pid) for pid in (await worker.stdout.readline()).split()]
    assert len(pids) >= (2 if state == "running" else 1)
    assert all(is_running(pid) for pid in pids)
    worker.kill()
    await worker.wait()
    await until(lambda: not any(is_running(pid) for pid in pids), "the children are gone")


async def test_a_child_that_cannot_be_adopted_is_ended_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_pid: int, _flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    zygote = await zygote_process.Zygote.start(zygote_process.Recipe(SOURCE, "scripted", tmp_path))
    try:
        await (await zygote.fork()).stop()
        descriptors = _open_descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", refused)
            for _ in range(3):
                with pytest.raises(OSError, match="Too many open files"):
                    await zygote.fork()
        await until(lambda: _open_descriptors() <= descriptors, "all is closed")  # others may have closed some
        await until(lambda: not _children_of(zygote.pid), "the children are gone")
    finally:
        await zygote.stop()


async def test_a_fork_that_is_cancelled_twice_ends_its_child_and_the_next_fork_gets_its_own(tmp_path: Path) -> None:
    zygote = await zygote_process.Zygote.start(zygote_process.Recipe(SOURCE, "scripted", tmp_path))
    try:
        forking = asyncio.create_task(zygote.fork())
        while not zygote._asking.locked():
            await asyncio.sleep(0)
        for _ in range(2):
            forking.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await forking
        child = await zygote.fork()
        await until(lambda: _children_of(zygote.pid) == {child.pid}, "the first child is gone")
        assert await child.stop() == -signal.SIGKILL
    finally:
        await zygote.stop()


async def test_a_request_that_is_cancelled_before_its_answer_leaves_no_answer_for_the_next(tmp_path: Path) -> None:
    zygote = await zygote_process.Zygote.start(zygote_process.Recipe(SOURCE, "scripted", tmp_path))
    try:
        forking = asyncio.create_task(zygote._fork())
        while not zygote._asking.locked():
            await asyncio.sleep(0)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        with pytest.raises((OSError, EOFError)):  # the zygote is killed, and replaced
            await zygote.fork()
    finally:
        await zygote.stop()


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_answer_that_came_as_its_request_was_given_up_is_not_that_of_the_next(
    monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """The zygote lives a moment longer than the kill, and so does what it has answered. Taken for the pid of a fork,
    the 0 of a reaped child would be the worker's own process group.
    """
    monkeypatch.setattr(zygote_process, "_ANSWER_SECONDS", 0.0 if is_late else SECONDS)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "import time; time.sleep(600)")
    worker_end, zygote_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker_end.setblocking(False)
    zygote = zygote_process.Zygote(process, worker_end, ChildOutput(), frames.Ready(isolation="off", threads=1))
    try:
        reaping = asyncio.create_task(zygote.reap(4321))
        await asyncio.sleep(0)
        zygote_end.send(frames.NUMBER.pack(0))
        if not is_late:
            reaping.cancel()
        with pytest.raises((asyncio.CancelledError, EOFError)):
            await reaping
        with suppress(OSError):  # nobody listens any more
            zygote_end.send(frames.NUMBER.pack(0))
        monkeypatch.setattr(zygote_process, "_ANSWER_SECONDS", SECONDS)
        for _ in range(2):
            with pytest.raises((OSError, EOFError)):
                await zygote.reap(4322)
    finally:
        await zygote.stop()
        zygote_end.close()
