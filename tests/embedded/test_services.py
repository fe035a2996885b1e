"""`scripts/services` as a person starts it, and what is left when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from leasehold.embedded import services
from leasehold.embedded.directories import remove_abandoned
from leasehold.embedded.process import EmbeddedError
from tests.support.processes import Witness, command_lines_of, descendants, users_of_servers

Start = Callable[..., Coroutine[Any, Any, asyncio.subprocess.Process]]


@pytest.fixture
async def start(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Start it with arguments; whatever the test leaves running is killed."""
    root = Path("/var/tmp") / f"services-test-{os.getpid()}"  # noqa: S108 - the servers' user must reach it
    root.mkdir(mode=0o755, exist_ok=True)
    monkeypatch.setenv("LEASEHOLD_TMP", str(root))
    started: list[asyncio.subprocess.Process] = []

    async def start(*arguments: str) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "leasehold.embedded.services", "--not-durable", *arguments, stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()
    remove_abandoned(root)
    root.rmdir()


def directories_of_runs() -> list[Path]:
    return list(Path(os.environ["LEASEHOLD_TMP"]).iterdir())


async def until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    line = await process.stderr.readline()
    assert line.startswith(b"Ready"), line


async def test_a_command_gets_the_servers_and_gives_its_exit_code(start: Start) -> None:
    program = "import os, sys; print(os.environ['LEASEHOLD_DATABASE_URL']); sys.exit(7)"
    process = await start("--no-rabbitmq", "--", sys.executable, "-c", program)
    output, _ = await process.communicate()
    assert output.startswith(b"postgresql://leasehold:")
    assert process.returncode == 7


async def test_what_it_prints_leads_to_servers_that_answer(start: Start) -> None:
    process = await start("--no-rabbitmq", "--no-s3")
    await until_ready(process)
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert b"export LEASEHOLD_BROKER=postgres\n" in output
    assert b"export LEASEHOLD_DATABASE_URL=" in output


@pytest.mark.parametrize(
    ("command", "reason"), [("no-such-command", "No such file or directory"), (__file__, "Permission denied")]
)
async def test_a_command_that_cannot_be_started_is_said_in_one_line(start: Start, command: str, reason: str) -> None:
    process = await start("--no-rabbitmq", "--no-postgres", "--", command)
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().splitlines() == [f"{command} cannot be started: {reason}"]


async def test_nothing_outlives_a_killed_owner(start: Start) -> None:
    process = await start()
    await until_ready(process)
    below = descendants(process.pid)
    commands = " ".join(command_lines_of(below))
    assert all(name in commands for name in ("postgres", "beam.smp", "epmd", "rclone"))
    assert 0 not in users_of_servers(below)
    witness = Witness(below)
    process.kill()
    await witness.all_ended()


async def test_the_next_start_removes_what_a_killed_owner_left(start: Start) -> None:
    killed = await start("--no-rabbitmq", "--no-s3")
    await until_ready(killed)
    (left,) = directories_of_runs()
    witness = Witness(descendants(killed.pid))
    killed.kill()
    await witness.all_ended()
    following = await start("--no-rabbitmq", "--no-postgres", "--", "true")
    await following.communicate()
    assert not left.exists()


async def test_kept_data_is_there_again(start: Start, run_directory: Path) -> None:
    data = run_directory / "kept"
    for query in ("CREATE TABLE kept AS SELECT 7 AS value", "SELECT value FROM kept"):
        process = await start("--no-rabbitmq", "--no-s3", "--data", str(data))
        await until_ready(process)
        assert process.stdout is not None
        lines = [await process.stdout.readline(), await process.stdout.readline()]
        url = lines[1].decode().strip().partition("=")[2].strip("'")
        connection = await asyncpg.connect(url)
        answer = await connection.fetchval(query)
        await connection.close()
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    assert answer == 7


async def test_a_command_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(services, "STOP_SECONDS", 0.3)
    program = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        " pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    ignores, stopped = tmp_path / "ignores", asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        command = [sys.executable, "-c", program, str(ignores)]
        running = group.create_task(services.run_command(command, {}, stopped))
        while not ignores.exists():
            await asyncio.sleep(0.01)
        stopped.set()
    assert running.result() == 128 + signal.SIGKILL


async def test_a_command_of_another_user_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "STOP_SECONDS", 0.1)
    processes: list[asyncio.subprocess.Process] = []

    def refuse(process: asyncio.subprocess.Process, _number: int) -> None:
        processes.append(process)
        raise PermissionError

    monkeypatch.setattr(asyncio.subprocess.Process, "send_signal", refuse)
    stopped = asyncio.Event()
    stopped.set()
    with pytest.raises(EmbeddedError, match="sleep runs as another user"):
        await services.run_command(["sleep", "60"], {}, stopped)
    monkeypatch.undo()
    processes[0].kill()
    await processes[0].wait()
