"""Behind PgBouncer: its real package, in both modes. What cannot work is refused with what to set."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest
from pydantic import SecretStr

from leasehold.cli.migrate import upgrade
from leasehold.db.database import PLANNER_SETTINGS, connected, migrate
from leasehold.db.poolers import check_pooler
from leasehold.domain.errors import BadSetting
from leasehold.embedded.debian import unpack_packages
from leasehold.embedded.directories import cache_directory
from leasehold.embedded.ports import free_port
from leasehold.embedded.postgres import DATABASE, USER, Postgres
from leasehold.embedded.process import EmbeddedError, Server, unprivileged
from leasehold.settings import Settings
from tests.support.not_here import not_here

SECONDS = 60.0


@pytest.fixture(scope="module")
async def program() -> Path:
    target = cache_directory() / "pgbouncer"
    path = target / "usr/sbin/pgbouncer"
    if not path.exists():
        try:
            await unpack_packages(["pgbouncer"], target, with_missing=True)
        except EmbeddedError as error:
            not_here(f"PgBouncer: {error}")
    return path


@pytest.fixture(scope="module")
async def server(run_directory: Path) -> AsyncIterator[Postgres]:
    server = Postgres(run_directory / "postgres-behind-a-pooler", durable=False)
    await server.start()
    await migrate(server.url)
    yield server
    await server.kill()
    await server.forget()


@asynccontextmanager
async def pooled(program: Path, server: Postgres, directory: Path, mode: str) -> AsyncIterator[str]:
    """The URL of a PgBouncer before `server`."""
    run_as, port = unprivileged(), free_port()
    run_as.make_directory(directory)
    password = urlsplit(server.url).password
    run_as.write_file(directory / "users", f'"{USER}" "{password}"\n')
    run_as.write_file(
        directory / "pgbouncer.ini",
        f"[databases]\n{DATABASE} = host=127.0.0.1 port={server.port}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {directory}/users\n"
        f"pool_mode = {mode}\ndefault_pool_size = 10\n",
    )
    libraries = os.pathsep.join(map(str, program.parents[2].glob("usr/lib/*-gnu")))
    pooler = await Server.start(
        "PgBouncer",
        [program, directory / "pgbouncer.ini"],
        log=directory / "log",
        env={"LD_LIBRARY_PATH": libraries},
        cwd=directory,
        run_as=run_as,
    )
    url = f"postgresql://{USER}@127.0.0.1:{port}/{DATABASE}"
    try:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    await (await asyncpg.connect(url, statement_cache_size=0)).close()
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    break
        yield url
    finally:
        await pooler.kill()


def settings_of(url: str, **more: str) -> Settings:
    changes = {name: SecretStr(value) for name, value in more.items()}
    return Settings(_env_file=None, database_url=SecretStr(url), broker="postgres", object_store="none", **changes)  # type: ignore[arg-type]  # only secrets


async def test_a_pooler_in_transaction_mode_that_keeps_no_statements_is_refused_with_what_to_set(
    program: Path, server: Postgres, run_directory: Path
) -> None:
    async with pooled(program, server, run_directory / "pooler-transaction", "transaction") as url:
        with pytest.raises(BadSetting, match=r"max_prepared_statements = 1000 .* pool_mode = session"):
            await check_pooler(settings_of(url))
        environment = {
            "LEASEHOLD_DATABASE_URL": url,
            "LEASEHOLD_BROKER": "postgres",
            "LEASEHOLD_OBJECT_STORE": "none",
            "LEASEHOLD_PIPELINES": "tests.failover.work:pipelines",
        }
        for command in (["leasehold.worker"], ["leasehold.api", "--port", "0"]):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *command),
                env=os.environ | environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            answer, _ = await asyncio.wait_for(process.communicate(), SECONDS)
            said = answer.decode()
            assert process.returncode == 1, said
            assert "max_prepared_statements" in said
            assert "Traceback" not in said


async def test_migrate_refuses_a_pooler_in_transaction_mode_and_uses_the_direct_url(
    program: Path, server: Postgres, run_directory: Path
) -> None:
    """Its advisory lock and its lock_timeout would stay in a session that others get."""
    async with pooled(program, server, run_directory / "pooler-migrate", "transaction") as url:
        with pytest.raises(BadSetting, match="LEASEHOLD_DATABASE_DIRECT_URL"):
            await upgrade(settings_of(url), "head")
        await upgrade(settings_of(url, database_direct_url=server.url), "head")
        connection = await asyncpg.connect(server.url)
        left = await connection.fetch("SELECT * FROM pg_locks WHERE locktype = 'advisory'")
        await connection.close()
        assert left == []


async def test_a_pooler_in_session_mode_needs_the_planners_settings_of_the_role(
    program: Path, server: Postgres, run_directory: Path
) -> None:
    async with pooled(program, server, run_directory / "pooler-session", "session") as url:
        with pytest.raises(BadSetting, match=r"ALTER ROLE .* SET plan_cache_mode = 'force_generic_plan'"):
            await check_pooler(settings_of(url))
        connection = await asyncpg.connect(server.url)
        try:
            for name, value in PLANNER_SETTINGS.items():
                await connection.execute(f"ALTER ROLE {USER} SET {name} = '{value}'")
            # A session ends some time after it was asked to. Until then, PgBouncer may give it to the next client.
            while await connection.fetch("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1"
                                         " AND pid <> pg_backend_pid()", USER):  # fmt: skip
                await asyncio.sleep(0.01)
        finally:
            await connection.close()
        await check_pooler(settings_of(url))
        async with connected(settings_of(url), "test") as pooled_connection:
            assert await pooled_connection.fetchval("SELECT count(*) FROM job") == 0


async def test_without_a_pooler_there_is_nothing_to_set(server: Postgres) -> None:
    await check_pooler(settings_of(server.url))
