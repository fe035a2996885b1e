"""Opens connections to PostgreSQL: every statement runs through asyncpg.

SQLAlchemy describes the schema (tables.py and its neighbours) and runs the migrations, under alembic. Neither the API
nor a worker loads SQLAlchemy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from uuid import UUID

import asyncpg
import orjson
from asyncpg.pool import PoolConnectionProxy

from leasehold.db.commit_points import connection_class
from leasehold.db.servers import Leaving, open_connection
from leasehold.runtime.holding import borrowed
from leasehold.settings import Settings
from leasehold.urls import database_url

if TYPE_CHECKING:
    from leasehold.db.upgrading.patience import Patience, Progress

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]"
Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"


class ConnectionSource(Protocol):
    """Lends connections, as a pool does."""

    def acquire(self) -> AbstractAsyncContextManager[Connection]: ...


_LONGER_THAN_ANYTHING = timedelta(days=36_500)

#: Settings of the planner for the transitions. These statements find rows by key and join in the order of their text.
#: The planner must follow: statistics of a young table would make it scan the whole table. And it must plan only once:
#: planning these statements costs more than running them.
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
        "idle_in_transaction_session_timeout": "30s",
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "2",
        **PLANNER_SETTINGS,
    }


def _uuid_text(value: object) -> str:
    # orjson does not serialise asyncpg's UUIDs: they are a subclass of uuid.UUID.
    if isinstance(value, UUID):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


async def _encode_json(connection: Connection) -> None:
    """Let statements pass and return jsonb as Python values."""
    await connection.set_type_codec(
        "jsonb",
        schema="pg_catalog",
        encoder=lambda value: b"\x01" + orjson.dumps(value, default=_uuid_text),
        decoder=lambda data: orjson.loads(data[1:]),
        format="binary",
    )


async def _no_reset(_connection: Connection) -> None:
    """Keep the session as it is: no statement changes its state, and asyncpg's reset costs a round trip a release."""


async def connect(settings: Settings, name: str) -> asyncpg.Connection[asyncpg.Record]:
    """Open one connection outside the pool. Raises one of TRY_AGAIN when PostgreSQL does not answer."""
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


@asynccontextmanager
async def connected(settings: Settings, name: str) -> AsyncIterator[Connection]:
    """As `connect`, for the block: its end closes the connection."""
    connection = await connect(settings, name)
    try:
        yield connection
    finally:
        await connection.close()


async def is_direct(connection: Connection) -> bool:
    """Whether the connection has a session of its own. Behind a pooler a connection has none, and session locks protect
    nothing.

    The process id shows a pooler: the id in the pooler's greeting is not the id of the server process that answers
    queries.
    """
    return bool(await connection.fetchval("SELECT pg_backend_pid()") == connection.get_server_pid())


def make_pool(settings: Settings, name: str, size: int, *, replica: bool = False) -> Pool:
    """A pool of at most `size` connections (pool_sizes.py). It is not open yet: use `async with` on it, or await it.

    Opening the pool makes no connection, so it works while PostgreSQL is down. If the server only reads, the pool opens
    new connections within two seconds, perhaps to another server. Meanwhile the old ones serve reads.

    `replica`: the pool leads to `database_replica_url`, and leaves a server that takes writes.
    """
    leaving = Leaving(replica=replica)

    async def lend(connection: PoolConnectionProxy[asyncpg.Record]) -> None:
        borrowed(connection)
        await leaving(pool, connection)

    async def connect(*_dsn: Any, **options: Any) -> asyncpg.Connection[asyncpg.Record]:
        secret = settings.database_replica_url if replica else settings.database_url
        url = database_url(secret.get_secret_value())  # its file may hold another password by now
        return await open_connection(url, host_timeout=settings.database_host_timeout, replica=replica, **options)

    pool: Pool = asyncpg.create_pool(
        connect=connect,
        min_size=0,
        max_size=size,
        max_inactive_connection_lifetime=300,
        init=_encode_json,
        setup=lend,
        reset=_no_reset,
        timeout=settings.database_host_timeout if replica else settings.database_timeout,
        command_timeout=settings.database_timeout,
        server_settings=_server_settings(name),
        connection_class=connection_class(),
    )
    return pool


async def lock_name(connection: Connection, name: str) -> None:
    """Lock `name` until the end of the caller's transaction. Wait while another transaction holds the lock.

    Call this in a transaction, before the statement that counts rows. That statement then sees the rows of every
    transaction that held the lock before.
    """
    await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", name)


def window_interval(seconds: float | None) -> timedelta:
    """The poll window of a statement, as an interval. None: no bound, the statement reads all due rows."""
    return _LONGER_THAN_ANYTHING if seconds is None else timedelta(seconds=seconds)


def unindexed(condition: str) -> str:
    """SQL: the condition in a form that no partial index matches, for a statement that finds its rows by id.

    With the plain condition, the planner may choose a partial index that is almost empty by the statistics, and scan
    this index for each row. The scan is slow, because the index still holds every row that left it since the last
    vacuum.
    """
    return f"CASE WHEN {condition} THEN true ELSE false END"


#: Alembic has one context for the whole process.
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
    """Bring the schema at the libpq URL `url` to `revision`. Concurrent callers wait for one another.

    `versions`, `table`: the folder of another schema's revisions, and the table that stores its current revision.
    `patience`: with locks that others hold; None: the defaults. `progress` gets what was applied, also before an error.
    Raises SchemaLocked.
    """
    attributes = {"url": url, "version_table": table, "patience": patience, "progress": progress}
    await asyncio.to_thread(_upgrade, revision, versions, attributes)


def records(rows: list[asyncpg.Record]) -> list[dict[str, Any]]:
    """The rows as dictionaries, by column name."""
    return [dict(row) for row in rows]


@asynccontextmanager
async def in_order(connection: Connection) -> AsyncIterator[None]:
    """Let PostgreSQL read the index that drives in the index's order, and end where the page is full.

    Where an index finds a few thousand jobs, the planner would rather read all of them and sort: it does not know that
    the first fifty are enough. Statements of an outer transaction that follow the block are planned as before it.
    """
    is_nested = connection.is_in_transaction()
    async with connection.transaction():
        await connection.execute("SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off")
        yield
        if is_nested:  # the end of a savepoint that is kept keeps its settings
            await connection.execute("SET LOCAL enable_bitmapscan = DEFAULT; SET LOCAL enable_sort = DEFAULT")
