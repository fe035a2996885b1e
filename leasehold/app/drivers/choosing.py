"""Finds the driver of a connection that the user gives. It imports no driver: the user's program has loaded its own."""

from __future__ import annotations

import sys
from typing import Any

from leasehold.app.drivers.foreign import Asyncpg, AsyncPsycopg, AsyncSqlAlchemy, Foreign, Psycopg, SqlAlchemy

#: (module, class) of a connection, and the class in foreign.py that adapts it. The first row that fits counts.
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
    """The adapter of the user's connection (foreign.py). Raises TypeError for a connection of an unknown driver."""
    unwrapped = _unwrapped(connection)
    for module, name, driver in _DRIVERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(unwrapped, kind):
            foreign: Foreign = driver(unwrapped)
            return foreign
    below = "" if unwrapped is connection else f" over a {type(unwrapped).__module__}.{type(unwrapped).__qualname__}"
    raise TypeError(f"a {type(connection).__name__}{below} is no connection to submit in: give {_SUPPORTED}")


def _unwrapped(connection: Any) -> Any:
    """The session in a scoped_session, or the driver's connection in a connection of Django. Else the connection
    itself.
    """
    kind = type(connection)
    if kind.__name__ in ("scoped_session", "async_scoped_session") and kind.__module__.startswith("sqlalchemy."):
        return connection.registry()
    if any(base.__module__.startswith("django.") for base in kind.__mro__):
        connection.ensure_connection()
        return connection.connection
    return connection
