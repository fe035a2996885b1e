"""Which driver a connection of the user's is of. Nothing is imported: who has a connection has loaded its driver."""

from __future__ import annotations

import sys
from typing import Any

from leasehold.app.drivers.foreign import Asyncpg, AsyncPsycopg, AsyncSqlAlchemy, Foreign, Psycopg, SqlAlchemy

#: Module and class, and what reads it. The first that fits is taken.
_DRIVERS: tuple[tuple[str, str, type[Any]], ...] = (
    ("sqlalchemy.ext.asyncio", "AsyncSession", AsyncSqlAlchemy),
    ("sqlalchemy.ext.asyncio", "AsyncConnection", AsyncSqlAlchemy),
    ("sqlalchemy.orm", "Session", SqlAlchemy),
    ("sqlalchemy.engine", "Connection", SqlAlchemy),
    ("psycopg", "AsyncConnection", AsyncPsycopg),
    ("psycopg", "Connection", Psycopg),
    ("asyncpg", "Connection", Asyncpg),
    ("asyncpg.pool", "PoolConnectionProxy", Asyncpg),
)
_SUPPORTED = (
    "a Session, AsyncSession, Connection or AsyncConnection of SQLAlchemy, an asyncpg connection, or a psycopg 3 "
    "Connection or AsyncConnection"
)


def foreign_of(connection: Any) -> Foreign:
    """Raises TypeError for what is no connection of a known driver."""
    given = _unwrapped(connection)
    for module, name, driver in _DRIVERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(given, kind):
            foreign: Foreign = driver(given)
            return foreign
    raise TypeError(f"a {type(connection).__name__} is no connection to submit in: give {_SUPPORTED}")


def _unwrapped(connection: Any) -> Any:
    """The session of a scoped_session, and psycopg's connection below Django's."""
    kind = type(connection)
    if kind.__name__ in ("scoped_session", "async_scoped_session") and kind.__module__.startswith("sqlalchemy."):
        return connection.registry()
    if kind.__module__.startswith("django."):
        connection.ensure_connection()
        return connection.connection
    return connection
