"""A primary and its standby, by pg_basebackup and streaming replication, on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from chaos.replicas import connected, copy, make_synchronous, promote
from leasehold.db.database import migrate
from leasehold.embedded.postgres import DATABASE, Postgres
from leasehold.settings import Settings

SECONDS = 60.0


@dataclass
class Cluster:
    primary: Postgres
    standby: Postgres

    @property
    def url(self) -> str:
        """Names both servers."""
        login = self.primary.url.partition("@")[0]
        return f"{login}@127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}/{DATABASE}"

    def settings(self, **more: Any) -> Settings:
        room = {"database_host_timeout": 10.0}  # a server that dies refuses; one that lives may have no processor
        return Settings(_env_file=None, database_url=SecretStr(self.url), broker="postgres", **(room | more))

    async def replicated(self) -> None:
        """Wait until the standby has everything that the primary has committed."""
        async with asyncio.timeout(SECONDS), connected(self.primary) as primary:
            while not await primary.fetchval(
                "SELECT bool_and(replay_lsn >= pg_current_wal_lsn()) FROM pg_stat_replication"
            ):
                await asyncio.sleep(0.02)

    async def cut_replication(self) -> None:
        """From now on the standby gets nothing: what the primary commits is the tail that a failover loses."""
        async with asyncio.timeout(SECONDS), connected(self.standby) as standby, connected(self.primary) as primary:
            await standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
            await standby.execute("SELECT pg_reload_conf()")
            while await primary.fetchval("SELECT count(*) FROM pg_stat_replication"):
                await asyncio.sleep(0.02)

    async def receiving_nothing(self) -> AbstractContextManager[None]:
        """For a block: the standby's receiver stands still."""
        async with connected(self.standby) as standby:
            pid: int = await standby.fetchval("SELECT pid FROM pg_stat_wal_receiver")
        return _standing_still(pid)

    async def fail_over(self) -> None:
        """The primary's machine dies, and the standby is promoted."""
        await self.primary.kill()
        await self.promote()

    async def promote(self) -> None:
        await promote(self.standby)


@contextmanager
def _standing_still(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def cluster_in(directory: Path, mode: str) -> AsyncIterator[Cluster]:
    """A migrated cluster. `mode`: a row of docs/operations/failover.md."""
    folders = (directory.with_name(f"{directory.name}-{role}") for role in ("primary", "standby"))
    cluster = Cluster(*(Postgres(folder, durable=True) for folder in folders))
    try:
        await cluster.primary.start()
        await migrate(cluster.primary.url)
        await copy(cluster.primary, cluster.standby)
        await cluster.standby.start()
        if mode != "asynchronous":
            await make_synchronous(cluster.primary, mode)
        await cluster.replicated()
        yield cluster
    finally:
        for server in (cluster.primary, cluster.standby):
            await server.kill()
            await server.forget()
            shutil.rmtree(server.directory, ignore_errors=True)
