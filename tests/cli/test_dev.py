"""`leasehold dev` keeps its API and its worker up until it is stopped, in whatever way, and says what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from leasehold.cli import dev
from leasehold.embedded.process import event_of_stop_signals
from tests.support.databases import Databases
from tests.support.processes import Witness, command_of, descendants

SHOP = """
import asyncio

from leasehold import App

app = App("shop")


@app.task
def add(a: int, b: int) -> int:
    return a + b


@app.task
async def take_long() -> None:
    await asyncio.sleep(3600)
"""
SUBMIT = "from shop import add; print(add.submit(1, 2).result())"
SECONDS = 60.0


@pytest.fixture(autouse=True)
def in_a_terminal() -> Iterator[None]:
    """Whoever runs the tests may have begun them with `nohup`. A program would inherit that, and ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
async def database(postgres: Databases) -> AsyncIterator[str]:
    url = await postgres.create_database()
    yield url
    await postgres.drop_database(url)


@pytest.fixture
async def shop(tmp_path: Path, database: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`leasehold dev shop:app` in `tmp_path`, which serves."""
    (tmp_path / "shop.py").write_text(SHOP)
    options = ("--port", "0", "--database-url", database)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "leasehold.cli.main", "dev", "shop:app", *options,
        cwd=tmp_path, env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(SECONDS):
        while not (tmp_path / ".leasehold" / "dev.env").exists():
            assert process.returncode is None, await process.communicate()
            await asyncio.sleep(0.05)
    yield process
    if process.returncode is None:
        process.kill()
    await process.communicate()


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("LEASEHOLD_")}


def workers_of(process: asyncio.subprocess.Process) -> list[int]:
    """The guard of the worker has the worker's command line in its own."""
    found = []
    for pid in descendants(process.pid):
        with suppress(OSError):  # it has ended
            command = command_of(pid)
            if command.endswith("-m leasehold.worker") and "guard.py" not in command:
                found.append(pid)
    return found


async def test_a_killed_worker_is_replaced_and_a_closed_terminal_leaves_nothing(
    shop: asyncio.subprocess.Process, tmp_path: Path, database: str
) -> None:
    (worker,) = workers_of(shop)
    os.kill(worker, signal.SIGKILL)
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUBMIT, cwd=tmp_path, env=environment(), stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(SECONDS):
            assert (await program.communicate())[0] == b"3\n"
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    witness = Witness(descendants(shop.pid))
    shop.send_signal(signal.SIGHUP)
    output, _ = await shop.communicate()
    assert (shop.returncode, b"worker has ended, and starts again" in output) == (0, True)
    assert not (tmp_path / ".leasehold" / "dev.env").exists()
    await witness.all_ended()
    connection = await asyncpg.connect(database)
    keys = await connection.fetch("SELECT client_id, revoked_at IS NULL AS is_valid FROM api_key")
    await connection.close()
    assert [tuple(key) for key in keys] == [("dev", False)]


async def test_a_step_that_runs_while_the_code_changes_is_released_and_charged_no_loss(
    shop: asyncio.subprocess.Process, tmp_path: Path, database: str
) -> None:
    """After a few losses the run would fail with `worker_lost`."""
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from shop import take_long; take_long.submit()", cwd=tmp_path, env=environment()
    )
    assert await program.wait() == 0
    connection = await asyncpg.connect(database)
    try:
        async with asyncio.timeout(SECONDS):
            await until_claimed(connection, 1)
            (tmp_path / "shop.py").write_text(f"{SHOP}\n# changed\n")
            await until_claimed(connection, 2)
        assert await connection.fetchval("SELECT losses FROM task") == 0
    finally:
        await connection.close()


async def until_claimed(connection: asyncpg.Connection[Any], times: int) -> None:
    while await connection.fetchval("SELECT count(*) FROM task WHERE status = 'running' AND epoch = $1", times) != 1:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_each_signal_that_ends_a_program_stops_the_servers_first(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    loop = asyncio.get_running_loop()
    handled: dict[int, Any] = {}
    monkeypatch.setattr(loop, "add_signal_handler", handled.__setitem__)
    stopped = event_of_stop_signals()
    assert not stopped.is_set()
    handled[number]()
    assert stopped.is_set()


async def test_a_program_that_nohup_has_started_survives_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handled: dict[int, Any] = {}
    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", handled.__setitem__)
    try:
        event_of_stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert handled.keys() == {signal.SIGINT, signal.SIGTERM}


async def test_a_watch_that_fails_is_an_error_and_everything_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as of a folder that was deleted. It ended with `stopping` and status 0."""
    ended: list[bool] = []

    async def leave(*_error: object) -> None:
        ended.append(True)

    async def start(*_arguments: object) -> Any:
        return SimpleNamespace(environment={}, api_url="", api_key="", __aexit__=leave)

    async def watch(*_arguments: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dev, "Installation", lambda **_options: None)
    monkeypatch.setattr(dev, "_start_unless_stopped", start)
    monkeypatch.setattr(dev, "_welcome_text", lambda _installation: "")
    monkeypatch.setattr(dev, "reload_on_change", watch)
    monkeypatch.setattr(dev, "event_of_stop_signals", asyncio.Event)
    with pytest.raises(FileNotFoundError):
        await dev.run(None)
    assert ended == [True]
