"""Makes a standby of a PostgreSQL server of this machine, which follows by streaming replication, and promotes it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg

from leasehold.embedded.postgres import USER, Postgres
from leasehold.embedded.postgres_programs import find_postgres
from leasehold.embedded.process import run, unprivileged

_SECONDS = 30.0
#: The pause after which a standby tries again to reach its primary. PostgreSQL's default is 5 s.
_RETRY: Final = "200ms"


async def copy(primary: Postgres, standby: Postgres, *, port: int | None = None) -> None:
    """Copy the primary's data into the empty directory of the standby. `port`: the standby reaches its primary at this
    port; None: at the primary's own.
    """
    run_as, directory = unprivileged(), standby.directory
    run_as.make_directory(directory)
    password = primary.url.partition(f"{USER}:")[2].partition("@")[0]
    run_as.write_file(directory / "password", password)
    source = f"postgresql://{USER}:{password}@127.0.0.1:{primary.port}"
    program = (await find_postgres(run_as)) / "pg_basebackup"
    options = ("-d", source, "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
    arguments: list[str | Path] = [program, "-D", directory / "data", *options]
    await run("pg_basebackup", arguments, log=directory / "copy.log", env={}, cwd=directory, run_as=run_as)
    if port is not None:
        with (directory / "data" / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = 'host=127.0.0.1 port={port} user={USER} password={password}'\n")


async def make_synchronous(primary: Postgres, mode: str) -> None:
    """Let each commit wait for the standby. Returns when the standby has all earlier commits. `mode`: a row of the
    table in docs/operations/failover.md, such as "quorum, on".
    """
    names, _, commit = mode.rpartition(", ")
    state = "quorum" if names else "sync"
    async with asyncio.timeout(_SECONDS), connected(primary) as connection:
        await connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{'ANY 1 (*)' if names else '*'}'")
        await connection.execute(f"ALTER SYSTEM SET synchronous_commit = '{commit}'")
        await connection.execute("SELECT pg_reload_conf()")
        while await connection.fetchval("SELECT sync_state FROM pg_stat_replication") != state:  # noqa: ASYNC110 - PostgreSQL sends no event
            await asyncio.sleep(0.02)
        # Commits wait only after the checkpointer has read the settings. It reads them before a checkpoint.
        await connection.execute("CHECKPOINT")
        written = await connection.fetchval("SELECT pg_current_wal_insert_lsn()::text")
        behind = "SELECT bool_or(flush_lsn IS NULL OR flush_lsn < $1::text::pg_lsn) FROM pg_stat_replication"
        while await connection.fetchval(behind, written):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)


async def make_asynchronous(primary: Postgres) -> None:
    """End the waiting of commits for a standby."""
    async with connected(primary) as connection:
        await connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
        await connection.execute("ALTER SYSTEM RESET synchronous_commit")
        await connection.execute("SELECT pg_reload_conf()")


async def retry_often(primary: Postgres) -> None:
    """Let the standbys of this primary try often to reach it: the primary's copies have its settings."""
    async with connected(primary) as connection:
        await connection.execute(f"ALTER SYSTEM SET wal_retrieve_retry_interval = '{_RETRY}'")
        await connection.execute("SELECT pg_reload_conf()")


async def promote(standby: Postgres) -> None:
    async with connected(standby) as connection:
        assert await connection.fetchval("SELECT pg_promote()")


async def discard(server: Postgres) -> None:
    """Kill the server, and remove its data."""
    await server.kill()
    await server.forget()
    await asyncio.to_thread(_remove, server.directory / "data")


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def connected(server: Postgres) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(server.url)
    try:
        yield connection
    finally:
        await connection.close()
