from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from leasehold.embedded import postgres
from leasehold.embedded.directories import temporary_root
from leasehold.embedded.postgres import Postgres
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import EmbeddedError, unprivileged
from leasehold.embedded.programs import can_run, runnable_copy_of
from tests.support.not_here import not_here
from tests.support.processes import Witness, descendants, started_since, users_of_servers


@pytest.fixture
async def server(run_directory: Path) -> AsyncIterator[Postgres]:
    server = Postgres(run_directory / "postgres-of-a-test", durable=True)
    await server.start()
    yield server
    await server.stop("immediate")
    await server.forget()
    shutil.rmtree(server.directory)


async def value_of(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_a_committed_row_survives_a_killed_server(server: Postgres) -> None:
    await value_of(server.url, "CREATE TABLE kept AS SELECT 7 AS value")
    await server.kill()
    assert not server.running
    await server.start()
    assert await value_of(server.url, "SELECT value FROM kept") == 7


async def test_a_killed_server_starts_again_although_another_process_has_its_id(server: Postgres) -> None:
    """After a restart of the machine or of a container the ids come again."""
    await server.kill()
    pid_file = server.directory / "data" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    user = unprivileged()
    stranger = await asyncio.create_subprocess_exec(
        "sleep", "600", user=user.user, group=user.group, extra_groups=[] if user.is_other_user else None
    )
    try:
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:], ""]))
        await server.start()
        assert await value_of(server.url, "SELECT 1") == 1
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()


async def test_a_server_starts_although_a_full_disk_has_left_its_lock_file_empty(server: Postgres) -> None:
    await server.kill()
    await server.forget()
    (server.directory / "data" / "postmaster.pid").write_text("")
    await server.start()
    assert await value_of(server.url, "SELECT 1") == 1


async def test_a_second_server_on_the_data_of_a_running_one_is_refused(server: Postgres) -> None:
    with pytest.raises(EmbeddedError, match=r'lock file "postmaster\.pid" already exists'):
        await Postgres(server.directory, durable=True).start()
    assert await value_of(server.url, "SELECT 1") == 1


async def test_a_server_whose_port_another_one_has_taken_does_not_start_and_says_why(
    server: Postgres, run_directory: Path
) -> None:
    """The other server answers in its place, and knows no such password."""
    late = Postgres(run_directory / "postgres-of-a-taken-port", durable=False, port=server.port)
    with pytest.raises(EmbeddedError, match=r"did not start(?s:.)*Address already in use"):
        await late.start()
    await late.forget()
    shutil.rmtree(late.directory)


@pytest.mark.parametrize("mode", ["fast", "smart", "immediate"])
async def test_a_stopped_server_comes_back_at_the_same_address(server: Postgres, mode: str) -> None:
    address = server.url
    await server.stop(mode)  # type: ignore[arg-type]  # parametrize gives strings
    await server.start()
    assert server.url == address
    assert await value_of(address, "SELECT 1") == 1


async def test_a_killed_initdb_is_followed_by_a_whole_one(run_directory: Path) -> None:
    """Ctrl-C at the first start of `leasehold dev --data`: initdb has written PG_VERSION and nothing else of use."""
    for number in range(5):  # on a busy machine initdb may have ended before the test looks again
        server = Postgres(run_directory / f"postgres-of-a-killed-initdb-{number}", durable=True)
        starting = asyncio.create_task(server.start())
        while not list(server.directory.glob("*/PG_VERSION")):
            if starting.done():
                await starting
            await asyncio.sleep(0.001)
        starting.cancel()
        await asyncio.wait({starting})
        if starting.cancelled() and not (server.directory / "data").exists():
            break
        await server.kill()
        await server.forget()
    assert starting.cancelled()
    assert not (server.directory / "data").exists()
    await server.start()
    assert await value_of(server.url, "SELECT 1") == 1
    assert not (server.directory / "data.new").exists()
    await server.stop("immediate")
    await server.forget()
    shutil.rmtree(server.directory)


async def test_a_server_that_does_not_answer_in_time_is_an_error_with_its_log(
    run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = run_directory / "programs-that-do-not-answer"
    directory.mkdir(mode=0o755)
    for name, script in {
        "initdb": 'mkdir "$2" && echo 15 >"$2/PG_VERSION"',
        "postgres": "echo recovering >&2\nexec sleep 60",
    }.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    for seconds in (0.5, 2.0, 8.0):  # a busy machine may need longer for the first line of the log
        monkeypatch.setattr(postgres, "START_SECONDS", seconds)
        server = Postgres(run_directory / "postgres-without-an-answer", durable=False, programs=directory)
        with pytest.raises(EmbeddedError, match=f"PostgreSQL did not answer within {seconds:g} s") as failed:
            await server.start()
        assert not server.running
        if "recovering" in str(failed.value):
            return
    pytest.fail("the error has no line of the log")


async def test_a_server_for_use_waits_for_the_disk(server: Postgres) -> None:
    assert await value_of(server.url, "SHOW fsync") == "on"


async def test_nobody_gets_in_without_the_password(server: Postgres) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(server.url, password="a guess")


@pytest.mark.parametrize("name", ["password", "verifier"])
async def test_the_password_file_is_its_owners_alone(server: Postgres, name: str) -> None:
    assert stat.S_IMODE((server.directory / name).stat().st_mode) == 0o600


async def test_the_random_password_is_checked_with_one_iteration(server: Postgres) -> None:
    stored = str(await value_of(server.url, "SELECT rolpassword FROM pg_authid WHERE rolname = 'leasehold'"))
    assert stored.startswith("SCRAM-SHA-256$1:")


async def test_no_process_of_it_runs_as_root_and_none_survives_a_kill(run_directory: Path) -> None:
    before = descendants(os.getpid())
    server = Postgres(run_directory / "postgres-to-kill", durable=False)
    await server.start()
    started = started_since(before)
    assert 0 not in users_of_servers(started)
    witness = Witness(started)
    await server.kill()
    await witness.all_ended()
    await server.forget()


async def test_a_program_in_a_closed_home_is_copied_where_its_user_can_start_it() -> None:
    if os.geteuid() != 0:
        not_here("only root starts programs as another user")
    nobody = unprivileged()
    program = await find_postgres(nobody)
    closed = temporary_root() / f"closed-{os.getpid()}"
    closed.mkdir(mode=0o700)
    try:
        echo = shutil.copy2("/bin/true", closed / "true")
        assert not await can_run(Path(echo), nobody)
        copy = await runnable_copy_of(Path(echo), [Path(echo)], nobody)
        assert await can_run(copy, nobody)
        shutil.rmtree(copy.parent)
    finally:
        shutil.rmtree(closed)
    assert await can_run(program / "postgres", nobody)


async def test_under_a_narrow_umask_a_copy_can_be_started_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        not_here("only root starts programs as another user")
    nobody = unprivileged()
    home = temporary_root() / f"narrow-{os.getpid()}"
    monkeypatch.setenv("LEASEHOLD_CACHE", str(home / "cache"))
    umask = os.umask(0o077)
    try:
        package = home / "package"
        (package / "bin").mkdir(parents=True)
        home.chmod(0o711)
        program = Path(shutil.copyfile("/bin/true", package / "bin" / "true"))
        os.chmod(program, 0o700)  # noqa: PTH101 - as `copyfile`: a moment
        copy = await runnable_copy_of(program, [package], nobody)
        assert await can_run(copy, nobody)
    finally:
        os.umask(umask)
        shutil.rmtree(home)
