"""The SQLAlchemy engine of the API's reads. Workers have none: to load it takes a tenth of a second and 10 MB."""

from __future__ import annotations

from functools import partial

import asyncpg
import orjson
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from leasehold.db.pool_sizes import ENGINE
from leasehold.settings import Settings
from leasehold.urls import database_url


def make_engine(settings: Settings, name: str) -> AsyncEngine:
    """For reads. A statement that takes longer than `database_timeout` is an error, not a wait."""
    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=partial(
            asyncpg.connect,
            database_url(settings.database_url.get_secret_value()).dsn,
            timeout=settings.database_timeout,
            command_timeout=settings.database_timeout,
            server_settings={"application_name": f"leasehold {name}", "jit": "off"},
        ),
        pool_size=ENGINE,
        max_overflow=0,
        pool_recycle=300,
        pool_timeout=settings.database_timeout,
        isolation_level="AUTOCOMMIT",
        hide_parameters=True,  # an error's text goes to the log; what was asked for does not
        json_serializer=lambda value: orjson.dumps(value).decode(),
        json_deserializer=orjson.loads,
    )
    event.listen(engine.sync_engine, "checkout", _refuse_closed)
    return engine


def _refuse_closed(connection: DBAPIConnection, *_of_pool: object) -> None:
    """A connection that the server has closed is replaced, and costs no request; asking so costs no round trip."""
    driver: asyncpg.Connection[asyncpg.Record] = connection.driver_connection
    if driver.is_closed():
        raise InvalidatePoolError
