"""Makes, lends and drops databases on the tests' PostgreSQL."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import asyncpg

Session = asyncpg.Connection  # without its type parameter: asyncpg's class takes none when it runs

#: Of a statement for which sessions have to end: each takes 5 s where they do not.
_TRIES = 12
#: How often, 5 ms apart, a database that comes back is asked whether the test's sessions have ended.
_CHECKS = 20
#: A database with larger tables is dropped: deleted rows stay in its indexes, and each later test would read past them.
_MOST_BYTES = 4 * 1024**2

_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
#: Changes with each statement that creates, alters or drops something in the database, and with each that makes
#: statistics of a table.
_SCHEMA = """
SELECT concat_ws(' ',
    (SELECT sum(reltuples) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_class),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_attribute),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_constraint),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_index),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_trigger),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_proc),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_namespace),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_extension),
    (SELECT concat(count(*), '/', max(xmin::text::bigint)) FROM pg_default_acl),
    (SELECT count(*) FROM pg_db_role_setting JOIN pg_database d ON d.oid = setdatabase
     WHERE d.datname = current_database()),
    (SELECT version_num FROM alembic_version))
"""
_BYTES = """
SELECT sum(pg_relation_size(oid))::bigint FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace
"""
_TABLES = """
SELECT oid::regclass::text FROM pg_class
WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND relname <> 'alembic_version'
"""
_RESET_SEQUENCES = """
SELECT setval(seqrelid, seqstart, false) FROM pg_sequence WHERE pg_sequence_last_value(seqrelid) IS NOT NULL
"""

#: The test ended the session, or its server.
_SESSION_ENDED = (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, asyncpg.InterfaceError, OSError)
#: Or it dropped a table. Or the server is not ours, and triggers cannot be switched off on it.
_NOT_EMPTIED = (*_SESSION_ENDED, asyncpg.UndefinedTableError, asyncpg.InsufficientPrivilegeError)


class Databases:
    """A PostgreSQL server for the tests' databases. `url`: its administrative database.

    `connect` opens a session of the platform to a URL.
    """

    def __init__(self, url: str, connect: Callable[[str], Awaitable[Session]]) -> None:
        self.url = url
        self._names: list[str] = []
        self._connection: Session | None = None
        self._lock = asyncio.Lock()  # a connection runs one statement at a time
        self._connect = connect
        self._free: dict[str, list[str]] = defaultdict(list)
        self._sessions: dict[str, Session] = {}
        self._schema: dict[str, str] = {}
        self._delete_rows: dict[str, str] = {}

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
        session = self._sessions.pop(url, None)
        if session is not None:
            session.terminate()
        name = _name(url)
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        self._names.remove(name)

    async def drop_all(self) -> None:
        for name in list(self._names):
            await self.drop_database(urlsplit(self.url)._replace(path=f"/{name}").geturl())

    async def lend(self, template: str, *, with_session: bool = False) -> str:
        """The URL of a database that equals the one at `template`: a copy, or one that an earlier test has given back.
        `with_session`: the test takes `session`. Otherwise nobody has a session there.

        Measured: to create and drop a copy takes PostgreSQL 19 ms of CPU time, to empty it 5 ms. And a new session
        plans a submission and a claim in 28 ms; an earlier test's session has planned them.
        """
        url = self._free[template].pop() if self._free[template] else await self.create_database(template)
        if template not in self._schema:
            session = await self._connect(url)
            self._schema[template] = await session.fetchval(_SCHEMA)
            deletes = [f"DELETE FROM {row[0]}" for row in await session.fetch(_TABLES)]
            # Without triggers and foreign keys, so in any order.
            self._delete_rows[template] = ";".join(
                ["SET session_replication_role = replica", *deletes, "RESET session_replication_role"]
            )
            self._sessions[url] = session
        if not with_session and url in self._sessions:
            await self._sessions.pop(url).close()
        return url

    async def give_back(self, url: str, template: str) -> None:
        """Make a database of `lend` equal to its template. Drop it instead, if the test has changed its schema, filled
        it, or left sessions that use it.
        """
        try:
            if await self._is_emptied(url, template):
                self._free[template].append(url)
                return
        except _NOT_EMPTIED:
            pass  # it cannot be lent again
        await self.drop_database(url)

    async def _is_emptied(self, url: str, template: str) -> bool:
        if url not in self._sessions:
            self._sessions[url] = await self._connect(url)
        session = self._sessions[url]
        for _ in range(_CHECKS):
            if not await session.fetchval(_SESSIONS):
                break
            await asyncio.sleep(0.005)
        else:
            return False
        if await session.fetchval(_SCHEMA) != self._schema[template] or await session.fetchval(_BYTES) > _MOST_BYTES:
            return False
        await session.execute(self._delete_rows[template])
        await session.execute(_RESET_SEQUENCES)
        return True

    @asynccontextmanager
    async def session(self, url: str) -> AsyncIterator[Session]:
        """A session of the platform to a database of `lend`: the one of the earlier test, or a new one."""
        session = self._sessions.pop(url, None) or await self._connect(url)
        yield session
        if session.is_closed() or session.is_in_transaction() or url in self._sessions:
            await session.close()
            return
        try:
            await session.reset()  # its locks, cursors, subscriptions and settings
            await session.execute("DISCARD TEMP")
        except _SESSION_ENDED:
            session.terminate()
            return
        self._sessions[url] = session

    async def close(self) -> None:
        for session in self._sessions.values():
            session.terminate()
        self._sessions.clear()
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def _execute(self, statement: str) -> None:
        """Over one connection for all databases of the run: PostgreSQL needs 5 ms of CPU time for a new one.

        PostgreSQL waits 5 s for sessions that end, of the database to drop and of the template. On a busy machine they
        may need longer: so the statement is tried again.
        """
        async with self._lock:
            if self._connection is None or self._connection.is_closed():
                self._connection = await asyncpg.connect(self.url)
            for _ in range(_TRIES - 1):
                with suppress(asyncpg.ObjectInUseError):
                    await self._connection.execute(statement)
                    return
            await self._connection.execute(statement)


def _name(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")
