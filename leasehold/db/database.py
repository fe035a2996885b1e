"""Opens asyncpg connections and pools to PostgreSQL, runs migrations, and holds small helpers for statements.

SQLAlchemy only describes the schema (the files `*tables.py`) and, with alembic, runs the migrations. Neither the API
nor a worker loads SQLAlchemy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from uuid import UUID

import asyncpg
import orjson
from asyncpg.pool import PoolConnectionProxy

from leasehold.db.commit_points import connection_class
from leasehold.db.failover import WatchedConnection
from leasehold.db.servers import WrongServerGuard, open_connection
from leasehold.runtime.holding import record_borrowed
from leasehold.settings import Settings
from leasehold.urls import database_url

if TYPE_CHECKING:
    from leasehold.db.upgrading.patience import Patience, Progress

#: A connection, or the proxy in which a pool lends a connection.
Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"


class ConnectionSource(Protocol):
    """Lends connections, as a pool does."""

    def acquire(self) -> AbstractAsyncContextManager[Connection]: ...


class OneConnection:
    """Lends the same connection each time, so that a request reads what it has written. After a failover, two
    connections of a pool may lead to two servers: the new primary, and the old primary, which lacks the newest rows.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        yield self._connection


#: The most seconds that `end_timed_out` waits. If the network is down, a longer wait would not help.
_CANCEL_SECONDS = 2.0
#: `window_interval` returns this for a poll without a window, because such an interval contains every row.
_UNBOUNDED = timedelta(days=36_500)

#: Settings of PostgreSQL's planner. The statements of leasehold/transitions find rows by key, and their text names the
#: tables in the best order for joins. With these settings the planner keeps this order. Without them, the statistics of
#: a young table would make it scan the whole table. The planner also plans each statement only once for each
#: connection, because planning costs more than running.
PLANNER_SETTINGS = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_material": "off",
    "join_collapse_limit": "1",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}


def _server_settings(name: str) -> dict[str, str]:
    return {
        "application_name": f"leasehold {name}",
        # Statements convert instants to JSON. Without this setting the text has the zone of the server or the database.
        "timezone": "UTC",
        "idle_in_transaction_session_timeout": "30s",
        # Without this setting, a session whose client has gone would stay while its statement waits for a lock. The
        # session would also keep its own locks, for example the presence lock of a worker that was killed.
        "client_connection_check_interval": "2s",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "2",
        **PLANNER_SETTINGS,
    }


def _uuid_text(value: object) -> str:
    # orjson does not serialise asyncpg's UUIDs, because they are of a subclass of uuid.UUID.
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


async def _encode_json(connection: Connection) -> None:
    """Let statements take and return jsonb as Python values. The byte 1 is the version of jsonb's binary format."""
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: b"\x01" + orjson.dumps(value, default=_uuid_text),
        decoder=lambda data: orjson.loads(data[1:]),
        format="binary",
    )


async def _no_reset(_connection: Connection) -> None:
    """Replaces asyncpg's reset, which costs a round trip each time that a connection returns to the pool. No reset is
    needed, because no statement of the platform changes the session.
    """


async def connect(settings: Settings, name: str) -> asyncpg.Connection[asyncpg.Record]:
    """Open one connection outside the pool. Raises one of TRY_AGAIN (runtime/transient.py) when PostgreSQL does not
    answer.
    """
    connection = await open_connection(
        database_url(settings.database_url.get_secret_value()),
        timeout=settings.database_timeout,
        host_timeout=settings.database_host_timeout,
        command_timeout=settings.database_timeout,
        server_settings=_server_settings(name),
        connection_class=connection_class(),
    )
    try:
        await _encode_json(connection)
    except BaseException:
        connection.terminate()
        raise
    return connection


async def end_timed_out(connection: Connection) -> None:
    """Close a connection on which a statement took too long, and wait until PostgreSQL has cancelled the statement.
    Waits for at most _CANCEL_SECONDS.

    asyncpg raises the TimeoutError before it has requested the cancel of the statement from PostgreSQL. `terminate`
    would drop that request. PostgreSQL would then keep the session as long as its statement waits for a lock. Each
    repetition of the statement would add such a session, up to `max_connections`.
    """
    with suppress(Exception):
        async with asyncio.timeout(_CANCEL_SECONDS):
            await connection.close()


@asynccontextmanager
async def connected(settings: Settings, name: str) -> AsyncIterator[Connection]:
    """Open a connection as `connect` does, and close it at the end of the block."""
    connection = await connect(settings, name)
    try:
        yield connection
    finally:
        await connection.close()


def is_of_platform(connection: object) -> bool:
    """Whether a pool or `connect` of this module made the connection, so that it takes jsonb as Python values."""
    # `_con`: the connection behind the proxy that a pool lends. `isinstance` cannot be used, because asyncpg's
    # metaclass makes it true for every connection of asyncpg.
    return WatchedConnection in type(getattr(connection, "_con", connection)).__mro__


async def is_direct(connection: Connection) -> bool:
    """Whether the connection leads to PostgreSQL itself. Through a pooler, other clients may use the same session, so
    session locks protect nothing.

    The process id that a pooler reports to a new connection is not the id of the server process that answers
    statements. So this function compares the two ids.
    """
    return bool(await connection.fetchval("SELECT pg_backend_pid()") == connection.get_server_pid())


def make_pool(settings: Settings, name: str, size: int, *, replica: bool = False) -> Pool:
    """A pool of at most `size` connections (pool_sizes.py). The pool is not open yet. Open it by `async with`, or await
    it.

    The opening makes no connection, so it succeeds even while PostgreSQL is down. When the server stops taking writes,
    the pool opens new connections within two seconds, perhaps to another server. Meanwhile its old connections serve
    reads.

    `replica`: the pool connects to `database_replica_url`, and leaves a server that has started to take writes.
    """
    leave_wrong_server = WrongServerGuard(replica=replica)

    async def before_lending(connection: PoolConnectionProxy[asyncpg.Record]) -> None:
        record_borrowed(connection)
        await leave_wrong_server(pool, connection)

    async def connect(*_dsn: Any, **options: Any) -> asyncpg.Connection[asyncpg.Record]:
        secret = settings.database_replica_url if replica else settings.database_url
        url = database_url(secret.get_secret_value())  # read again, because the password file may have changed
        return await open_connection(url, host_timeout=settings.database_host_timeout, replica=replica, **options)

    pool: Pool = asyncpg.create_pool(
        connect=connect,
        min_size=0,
        max_size=size,
        max_inactive_connection_lifetime=300,
        init=_encode_json,
        setup=before_lending,
        reset=_no_reset,
        timeout=settings.database_host_timeout if replica else settings.database_timeout,
        command_timeout=settings.database_timeout,
        server_settings=_server_settings(name),
        connection_class=connection_class(),
    )
    return pool


async def lock_name(connection: Connection, name: str) -> None:
    """Lock `name` until the end of the caller's transaction. Wait while another transaction holds the lock.

    Call this in a transaction, before a statement that counts rows. The statement then also counts the rows of every
    transaction that held the lock earlier.
    """
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", name)


def window_interval(seconds: float | None) -> timedelta:
    """The poll window of a statement, as an interval. With None, the window has no bound, so the statement reads all
    due rows.
    """
    return _UNBOUNDED if seconds is None else timedelta(seconds=seconds)


def row_count(status: str) -> int:
    """The number of rows that a statement changed. `status`: what `execute` returned, such as `DELETE 17`."""
    return int(status.rpartition(" ")[2])


def unindexed(condition: str) -> str:
    """SQL: the condition in a form that no partial index matches. Use it in a statement that finds its rows by id.

    With the plain condition, the planner may scan a partial index for each row, because its statistics say that the
    index is almost empty. That scan is slow, because until the next vacuum the index still holds entries of rows that
    no longer match.
    """
    return f"CASE WHEN {condition} THEN true ELSE false END"


def within_minute(column: str) -> str:
    """SQL condition: the instant in `column` is less than a minute ago. If PostgreSQL's clock steps back, instants from
    before the step may lie in the future. Because of the upper bound, such an instant counts only while it is less than
    a minute ahead. Without this bound, the instant would count until a minute after the clock has reached it.
    """
    minute = "interval '60 seconds'"
    return f"({column} > clock_timestamp() - {minute} AND {column} < clock_timestamp() + {minute})"


#: Alembic has one context for the whole process, so only one upgrade may run at a time.
_ALEMBIC = Lock()


def _upgrade(revision: str, versions: Path | None, attributes: Mapping[str, object]) -> None:
    from alembic import command  # noqa: PLC0415 - only migrations need alembic; it costs every process 10 MB

    from leasehold.db.upgrading.rendering import config_of  # noqa: PLC0415 - as above

    config = config_of(versions)
    config.attributes.update(attributes)
    with _ALEMBIC:
        command.upgrade(config, revision)


async def migrate(
    url: str,
    revision: str = "head",
    *,
    versions: Path | None = None,
    table: str = "alembic_version",
    patience: Patience | None = None,
    progress: Progress | None = None,
) -> None:
    """Bring the schema of the database `url` (a libpq URL) to `revision`. Callers that call this at the same time wait
    for one another.

    `versions`, `table`: for a schema other than the platform's, the folder of its revisions and the table that stores
    its current revision. `patience`: how long to wait for locks that others hold; None: the defaults. `progress`
    records the applied revisions, even if an error follows. Raises SchemaLocked if others hold the locks for longer.
    """
    attributes = {"url": url, "version_table": table, "patience": patience, "progress": progress}
    await asyncio.to_thread(_upgrade, revision, versions, attributes)


def records(rows: list[asyncpg.Record]) -> list[dict[str, Any]]:
    """The rows as dictionaries, by column name."""
    return [dict(row) for row in rows]


@asynccontextmanager
async def in_index_order(connection: Connection) -> AsyncIterator[None]:
    """For the statements in the block, make PostgreSQL read rows in the order of an index, and stop when the page is
    full.

    Otherwise, if the index has a few thousand matching jobs, PostgreSQL would read and sort all of them for a page of
    fifty. Statements after the block, in an outer transaction, are planned as usual.
    """
    is_nested = connection.is_in_transaction()
    async with connection.transaction():
        await connection.execute("SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")
        yield
        if is_nested:  # SET LOCAL lasts until the outer transaction ends, not only to the savepoint
            await connection.execute("SET LOCAL enable_bitmapscan = DEFAULT; SET LOCAL enable_sort = DEFAULT")
