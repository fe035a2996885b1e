"""Alembic's environment: asynchronous, one transaction a revision, one migrator at a time."""

from __future__ import annotations

import asyncio
from functools import partial

import asyncpg
from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from leasehold.db import run_tables, upload_tables
from leasehold.db.tables import metadata
from leasehold.pipelines.conversion import tables as conversion_tables
from leasehold.pipelines.generation import tables as generation_tables
from leasehold.settings import Settings
from leasehold.urls import database_url

#: Modules that add their tables to `metadata`. `alembic revision --autogenerate` would drop a table that nobody loaded.
DECLARING = (run_tables, upload_tables, conversion_tables, generation_tables)

#: Any number, the same in every release: migrators queue on this advisory lock.
_MIGRATORS = 7_305_411
_LOOK_SECONDS = 0.2


def _dsn() -> str:
    url: str = context.config.attributes.get("url") or Settings().database_url.get_secret_value()
    return database_url(url).dsn


def _is_ours(_object: object, name: str | None, kind: str, _reflected: bool, _other: object) -> bool:  # noqa: FBT001 - alembic's signature
    return not (kind == "table" and name is not None and name.startswith("event_"))


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        version_table=context.config.attributes.get("version_table", "alembic_version"),
        include_object=_is_ours,
    )
    with context.begin_transaction():
        context.run_migrations()


async def _main() -> None:
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=partial(asyncpg.connect, _dsn()), poolclass=NullPool
    )
    async with engine.connect() as connection:
        # Whoever waited for the lock inside PostgreSQL would hold a snapshot, which a revision that makes an index
        # concurrently waits for.
        while not await connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _MIGRATORS}):
            await connection.commit()
            await asyncio.sleep(_LOOK_SECONDS)
        await connection.execute(text("SET lock_timeout = '5s'"))
        await connection.commit()
        await connection.run_sync(_run)
        await connection.commit()
    await engine.dispose()


asyncio.run(_main())
