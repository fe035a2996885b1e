from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from leasehold.embedded.directories import temporary_root
from leasehold.embedded.postgres import Postgres, find_postgres
from leasehold.embedded.process import RunAs, unprivileged
from leasehold.embedded.programs import can_run, reachable
from tests.support.not_here import not_here
from tests.support.processes import Witness, descendants, users_of_servers


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


@pytest.mark.parametrize("mode", ["fast", "smart", "immediate"])
async def test_a_stopped_server_comes_back_at_the_same_address(server: Postgres, mode: str) -> None:
    address = server.url
    await server.stop(mode)  # type: ignore[arg-type]  # parametrize gives strings
    await server.start()
    assert server.url == address
    assert await value_of(address, "SELECT 1") == 1


async def test_a_server_for_use_waits_for_the_disk(server: Postgres) -> None:
    assert await value_of(server.url, "SHOW fsync") == "on"


async def test_nobody_gets_in_without_the_password(server: Postgres) -> None:
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(server.url, password="a guess")


async def test_the_password_file_is_its_owners_alone(server: Postgres) -> None:
    assert stat.S_IMODE((server.directory / "password").stat().st_mode) == 0o600


async def test_no_process_of_it_runs_as_root_and_none_survives_a_kill(run_directory: Path) -> None:
    before = descendants(os.getpid())
    server = Postgres(run_directory / "postgres-to-kill", durable=False)
    await server.start()
    started = descendants(os.getpid()) - before
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
        copy = await reachable(Path(echo), [Path(echo)], nobody)
        assert await can_run(copy, nobody)
        shutil.rmtree(copy.parent)
    finally:
        shutil.rmtree(closed)
    assert await can_run(program / "postgres", nobody)


async def test_the_directory_of_a_configured_postgres_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEASEHOLD_PG_BIN", "/opt/postgres/bin")
    assert await find_postgres(RunAs()) == Path("/opt/postgres/bin")
