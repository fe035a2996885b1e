"""A primary and a copy of it that only reads, on this machine. The copy gets nothing from the primary."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
from pydantic import SecretStr

from leasehold.embedded.postgres import DATABASE, USER, Postgres
from leasehold.settings import Settings

NOTE = "INSERT INTO written VALUES (1)"


@dataclass
class Pair:
    primary: Postgres
    standby: Postgres

    def settings(self, *ports: int, **more: float) -> Settings:
        """Of a URL with these hosts, in this order. A host that lives may have no processor for seconds."""
        room = {"database_timeout": 60.0, "database_host_timeout": 30.0}
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        password = self.primary.url.partition(f"{USER}:")[2].partition("@")[0]
        url = f"postgresql://{USER}:{password}@{hosts}/{DATABASE}"
        return Settings(_env_file=None, database_url=SecretStr(url), **(room | more))  # type: ignore[arg-type]  # only numbers


@asynccontextmanager
async def pair_in(directory: Path) -> AsyncIterator[Pair]:
    """With the table `written`."""
    folders = (directory.with_name(f"{directory.name}-{role}") for role in ("primary", "standby"))
    pair = Pair(*(Postgres(folder, durable=True) for folder in folders))
    await pair.primary.start()
    primary = await asyncpg.connect(pair.primary.url)
    await primary.execute("CREATE TABLE written (number int)")
    await primary.close()
    await pair.primary.stop()
    shutil.copytree(pair.primary.directory, pair.standby.directory, copy_function=shutil.copy2)
    owner = (pair.primary.directory / "data").stat()
    (pair.standby.directory / "data" / "standby.signal").touch()
    for path in (pair.standby.directory, *pair.standby.directory.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    await asyncio.gather(pair.primary.start(), pair.standby.start())
    yield pair
    for server in (pair.primary, pair.standby):
        await server.kill()
        await server.forget()
        shutil.rmtree(server.directory)
