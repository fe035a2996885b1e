"""Finds the adapter for the user's connection to PostgreSQL. An adapter is an object through which the platform submits
runs on a connection of one driver. This module imports no driver, because the user's program has already loaded the
driver of its connection.
"""

from __future__ import annotations

import sys
from typing import Any

from leasehold.app.drivers.adapters import Adapter, Asyncpg, AsyncPsycopg, AsyncSqlAlchemy, Psycopg, SqlAlchemy

#: The module and the class of a connection, and the adapter for it. The first row that matches is used.
_ADAPTERS: tuple[tuple[str, str, type[Any]], ...] = (
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
    "a Session, AsyncSession, Connection or AsyncConnection of SQLAlchemy, an asyncpg connection, a psycopg 3 "
    "Connection or AsyncConnection, or Django's connection"
)


def adapter_of(connection: Any) -> Adapter:
    """The adapter of the user's connection. Raises TypeError for a connection of an unknown driver."""
    unwrapped = _unwrapped(connection)
    for module, name, adapter_class in _ADAPTERS:
        connection_class = getattr(sys.modules.get(module), name, None)
        if connection_class is not None and isinstance(unwrapped, connection_class):
            adapter: Adapter = adapter_class(unwrapped)
            if isinstance(adapter, Psycopg) and unwrapped is not connection:
                adapter.wrapper = connection  # Django's own object, whose hooks run after the commit
            return adapter
    driver_part = "" if unwrapped is connection else f" over {name_of_type(unwrapped)}"
    raise TypeError(f"{name_of_type(connection)}{driver_part} is not a connection to submit in: give {_SUPPORTED}")


def name_of_type(value: Any) -> str:
    """The name of the value's type, with its module, because most drivers call their class `Connection`."""
    value_class = type(value)
    name = value_class.__qualname__
    return name if value_class.__module__ == "builtins" else f"{value_class.__module__}.{name}"


def _unwrapped(connection: Any) -> Any:
    """The session in a scoped_session, or the driver's connection in a connection of Django. Any other connection is
    returned as it is.
    """
    connection_class = type(connection)
    is_scoped_session = connection_class.__name__ in ("scoped_session", "async_scoped_session")
    if is_scoped_session and connection_class.__module__.startswith("sqlalchemy."):
        return connection.registry()
    if any(base.__module__.startswith("django.") for base in connection_class.__mro__):
        connection.ensure_connection()
        return connection.connection
    return connection
