"""The PostgreSQL server of a test session. The session starts it, or an environment variable names a running one. Each
test gets a copy of a migrated database.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import SecretStr

from leasehold.app.portal import Portal
from leasehold.db.database import connected, migrate
from leasehold.embedded.directories import RunDirectory
from leasehold.embedded.postgres import Postgres
from leasehold.settings import MIB, Settings

#: The environment variable with the URL of a PostgreSQL that runs already. The URL's user may create databases.
VARIABLE = "LEASEHOLD_TEST_DATABASE_URL"
#: PostgreSQL's data lies in this folder, which is in memory, because a copy of a database takes 12 ms there, and 70 ms
#: on a disk. If less than _MEMORY_BYTES are free in this folder, the data lies on the disk. (In a container the folder
#: has 64 MiB by default, too little even for an empty PostgreSQL.)
_MEMORY = Path("/dev/shm")  # noqa: S108 - RunDirectory makes a new folder there, for its user alone
_MEMORY_BYTES = 512 * MIB


class TestServer:
    """Use it as `with TestServer() as server`. `portal` has a thread with an event loop, which runs the coroutines of
    this class. So tests need no event loop.
    """

    __test__ = False  # otherwise pytest would collect the class as a test

    def __init__(self) -> None:
        self.portal = Portal("leasehold testing")
        self._stack = ExitStack()
        self._url = os.environ.get(VARIABLE, "")  # of the server; empty until this object has started it
        self._template: str | None = None  # the URL of the migrated database that `database` copies

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            opening.callback(self.portal.close)
            if not self._url:
                directory = opening.enter_context(RunDirectory(root=_memory())).path
                postgres = Postgres(directory / "postgres", durable=False)
                opening.callback(lambda: self.portal.call(postgres.stop("immediate")))
                self.portal.call(postgres.start())
                self._url = postgres.url
            self._stack = opening.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._stack:  # closes the stack, even if PostgreSQL does not answer any more
            if self._template is not None:
                self.drop(self._template)

    def database(self) -> str:
        """Make a database for one test, migrated and empty. Returns its URL."""
        if self._template is None:
            template = self._create(None)
            self.portal.call(migrate(template))
            self._template = template
        return self._create(self._template)

    def drop(self, url: str) -> None:
        self._execute(f'DROP DATABASE IF EXISTS "{_database_of(url)}" WITH (FORCE)')

    def _create(self, template: str | None) -> str:
        name = f"test_{secrets.token_hex(6)}"
        source = f' TEMPLATE "{_database_of(template)}" STRATEGY FILE_COPY' if template else ""
        self._execute(f'CREATE DATABASE "{name}"{source}')
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    def _execute(self, statement: str) -> None:
        async def execute() -> None:
            async with connected(Settings(database_url=SecretStr(self._url)), "testing") as connection:
                await connection.execute(statement)

        self.portal.call(execute())


def _memory() -> Path | None:
    """The folder in memory. Returns None if this folder has too little room, if this user may not write there, or if
    the user has named another folder ($LEASEHOLD_TMP).
    """
    if "LEASEHOLD_TMP" in os.environ or not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES else None


def _database_of(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")
