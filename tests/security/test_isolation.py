"""Where the kernel lacks a fence, isolated queues are refused unless somebody has written down to do without."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from leasehold.cli import doctor
from leasehold.cli.installation import Installation, default_isolation
from leasehold.db import handler_reads
from leasehold.db.database import Connection
from leasehold.domain.errors import DeclarationError
from leasehold.domain.ids import id_of_instant
from leasehold.domain.pipeline import Pipeline, Step
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.worker import parts
from leasehold.worker.sandbox import isolation, landlock, seccomp
from leasehold.worker.worker import Worker
from tests.factories import Rows
from tests.security import partly
from tests.support.not_here import not_here
from tests.worker.conftest import end_of

LESSER = ("without_landlock", "without_filter", "without_any")


def lesser(settings: Settings, tmp_path: Path, which: str, mode: str, **changes: Any) -> Settings:
    """The settings of a worker whose zygotes find fewer fences."""
    own = {"isolation": mode, "work_dir": str(tmp_path), "poll_seconds": 0.1, "worker_children": 1}
    return settings.model_copy(update={**own, "pipelines": f"tests.security.partly:{which}", **changes})


@contextmanager
def logged() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as logs:
        yield logs


def test_required_is_what_nobody_has_to_say() -> None:
    assert Settings(_env_file=None).isolation == "required"


@pytest.mark.parametrize("which", LESSER)
async def test_a_worker_without_a_fence_refuses_isolated_queues_in_one_line_and_serves_the_others(
    settings: Settings, tmp_path: Path, connection: Connection, which: str
) -> None:
    inline, isolated = (jobs.NewJob(pipeline, "t") for pipeline in (partly.inline, partly.isolated))
    await jobs.submit(connection, [isolated])
    await jobs.submit(connection, [inline])
    with logged() as logs:
        async with Worker(lesser(settings, tmp_path, which, "required"), partly.pipelines()) as worker:
            assert (await end_of(Rows(connection), inline.id))["status"] == "succeeded"
            await worker.complete.wait()
            assert worker.queues == {"partly-inline", "operations"}
            assert worker.parts.children.pids == frozenset()
            registered = await connection.fetchval("SELECT queues FROM worker WHERE id = $1", worker.id)
            assert registered == ["operations", "partly-inline"]
            assert (await Rows(connection).job(isolated.id))["finished_at"] is None
    (line,) = [entry for entry in logs if entry["event"] == "isolated queues are refused"]
    assert (line["log_level"], line["queues"]) == ("error", ["partly-isolated"])
    assert set(line["missing"]) <= {"seccomp", "network", "landlock"}
    assert "LEASEHOLD_ISOLATION=best_effort" in line["why"]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_worker_that_refuses_isolated_queues_says_that_it_has_no_code_of_isolated_steps(
    settings: Settings, tmp_path: Path, connection: Connection, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    """A task of such a step may stand in an inline queue, as in a template. Taken for one that has the code, the worker
    would claim the task and put it off each half minute for ever.
    """
    registered = asyncio.Event()
    warm, open_servers = parts._servable_queues, parts._open_servers

    async def warm_late(*arguments: Any) -> Any:
        await registered.wait()
        return await warm(*arguments)

    async def open_late(*arguments: Any) -> Any:
        opened = await open_servers(*arguments)
        *_, warming = arguments
        await asyncio.wait([warming])
        return opened

    if is_late:
        monkeypatch.setattr(parts, "_servable_queues", warm_late)
    else:
        monkeypatch.setattr(parts, "_open_servers", open_late)
    elsewhere = Pipeline("partly_isolated", module="", steps=[Step("act", queue="partly-inline", isolated=True)])
    place = ("partly-inline", "partly_isolated.act")
    old = jobs.NewJob(elsewhere, "t", id=id_of_instant(datetime.now(UTC) - timedelta(hours=2)))
    async with Worker(lesser(settings, tmp_path, "without_any", "required"), partly.pipelines()) as worker:
        assert (await handler_reads.served(connection, [place], []))[place].able == is_late
        registered.set()
        await worker.complete.wait()
        assert (await handler_reads.served(connection, [place], []))[place].able == 0
        assert "partly_inline.act" in worker.parts.registration.handlers
        assert "partly_isolated.act" not in worker.parts.registration.handlers  # it wakes no such task
        await jobs.submit(connection, [old])
        put_off = "SELECT available_at - clock_timestamp() FROM task WHERE job_id = $1 AND status = 'waiting'"
        async with asyncio.timeout(60):
            while (pause := await connection.fetchval(put_off, old.id)) is None:
                await asyncio.sleep(0.02)
    assert pause > timedelta(hours=1)  # for as long as the job is old


async def test_no_child_runs_anything_before_the_worker_knows_its_fences(
    settings: Settings, tmp_path: Path, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task of an isolated step that stands in an inline queue may be claimed while the worker warms up."""
    claimed = asyncio.Event()
    decide = parts._servable_queues

    async def decide_late(*arguments: Any) -> Any:
        await claimed.wait()
        return await decide(*arguments)

    monkeypatch.setattr(parts, "_servable_queues", decide_late)
    elsewhere = Pipeline("partly_isolated", module="", steps=[Step("act", queue="partly-inline", isolated=True)])
    early = jobs.NewJob(elsewhere, "t")
    await jobs.submit(connection, [early])
    async with Worker(lesser(settings, tmp_path, "without_any", "required"), partly.pipelines()) as worker:
        status = "SELECT status FROM task WHERE job_id = $1"
        async with asyncio.timeout(60):
            while await connection.fetchval(status, early.id) != "running":
                await asyncio.sleep(0.02)
            await until_children_are_ready(worker)
            claimed.set()
            while (now := await connection.fetchval(status, early.id)) == "running":
                await asyncio.sleep(0.02)
    assert now == "waiting", "it was put off, for a worker that may run it"


async def until_children_are_ready(worker: Worker) -> None:
    while worker.parts.children.isolation == "not started":
        await asyncio.sleep(0.02)


async def test_a_worker_that_is_left_with_nothing_ends_with_an_error(settings: Settings, tmp_path: Path) -> None:
    alone = lesser(settings, tmp_path, "without_landlock", "required", worker_queues="partly-isolated")
    with pytest.raises(DeclarationError, match=r"no queue is left to serve: .*no Landlock"):
        async with Worker(alone, partly.pipelines()):
            pass


async def test_its_process_then_says_why_and_ends_with_1(settings: Settings, tmp_path: Path) -> None:
    alone = lesser(settings, tmp_path, "without_landlock", "required", worker_queues="partly-isolated")
    environment = {
        f"LEASEHOLD_{name.upper()}": value
        for name in ("database_url", "amqp_url", "s3_endpoint", "isolation", "work_dir", "pipelines", "worker_queues")
        if (value := _plain(getattr(alone, name)))
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "leasehold.worker", env={**os.environ, **environment}, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        said, _ = await process.communicate()
    assert process.returncode == 1
    assert b"not started" in said
    assert b"no Landlock" in said
    assert b"Traceback" not in said


def _plain(value: Any) -> str:
    return str(value.get_secret_value() if hasattr(value, "get_secret_value") else value)


@pytest.mark.parametrize("which", LESSER)
async def test_best_effort_runs_isolated_steps_and_warns_at_each_start(
    settings: Settings, tmp_path: Path, connection: Connection, which: str
) -> None:
    for _ in range(2):
        with logged() as logs:
            async with Worker(lesser(settings, tmp_path, which, "best_effort"), partly.pipelines()):
                new = jobs.NewJob(partly.isolated, "t")
                await jobs.submit(connection, [new])
                assert (await end_of(Rows(connection), new.id))["status"] == "succeeded"
        (line,) = [entry for entry in logs if "best_effort" in entry["event"]]
        assert line["log_level"] == "warning"
        assert line["missing"]


async def test_with_all_fences_nothing_is_said(settings: Settings, tmp_path: Path) -> None:
    if default_isolation() == "best_effort":
        not_here("a kernel with seccomp and Landlock")
    with logged() as logs:
        async with Worker(lesser(settings, tmp_path, "pipelines", "required"), partly.pipelines()) as worker:
            await worker.complete.wait()
            assert worker.queues == {"partly-inline", "partly-isolated", "operations"}
    assert not [entry for entry in logs if entry["log_level"] == "error" or "best_effort" in entry["event"]]


@pytest.mark.parametrize(
    ("held", "absent"),
    [
        ("seccomp+landlock", []),
        ("seccomp", ["landlock"]),
        ("netns+landlock", ["seccomp"]),
        ("netns", ["seccomp", "landlock"]),
        ("limits only+landlock", ["seccomp", "network"]),
        ("limits only", ["seccomp", "network", "landlock"]),
    ],
)
def test_every_fence_is_missed_by_its_name(held: str, absent: list[str]) -> None:
    assert isolation.missing(held) == absent


def _take_away(monkeypatch: pytest.MonkeyPatch, fence: str) -> None:
    if fence == "landlock":
        monkeypatch.setattr(landlock, "version", lambda: 0)
    else:
        monkeypatch.setattr(seccomp, "supported_machine", lambda: None)


@pytest.mark.parametrize("fence", ["landlock", "seccomp"])
async def test_the_doctor_says_which_fence_is_missing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, fence: str
) -> None:
    _take_away(monkeypatch, fence)
    for mode, ok in (("required", False), ("best_effort", True)):
        findings = await doctor.examine(settings.model_copy(update={"isolation": mode}))
        (finding,) = [one for one in findings if one.part == "isolation"]
        assert finding.ok is ok
        assert fence in finding.found
        assert fence in finding.meaning.lower()


@pytest.mark.parametrize("fence", ["landlock", "seccomp"])
def test_a_try_on_such_a_machine_decides_for_best_effort_and_says_so(
    monkeypatch: pytest.MonkeyPatch, fence: str
) -> None:
    _take_away(monkeypatch, fence)
    assert default_isolation() == "best_effort"
    installation = Installation()
    installation.isolation = default_isolation()
    assert fence in installation.fences
    assert "LEASEHOLD_ISOLATION=best_effort" in installation.fences
