"""Alembic's environment: asynchronous, one transaction a revision, one migrator at a time."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib import import_module

from alembic import context
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from leasehold.db.servers import open_connection
from leasehold.db.tables import metadata
from leasehold.db.upgrading.patience import Patience, Progress, run_patiently
from leasehold.pipelines import SHIPPED
from leasehold.settings import Settings
from leasehold.urls import DatabaseUrl, database_url

# The tables that this release's own revisions make: a module that is not imported adds none to `metadata`, and
# autogenerate would take its tables for dropped.
for room in (
    "db.run_tables",
    "db.upload_tables",
    "db.workflow_tables",
    "db.log_tables",
    "db.audit_tables",
    "db.people_tables",
    "db.move_tables",
    "db.view_tables",
    *(f"pipelines.{kind.name}.tables" for kind in SHIPPED),
):
    import_module(f"leasehold.{room}")

#: Any number, the same in every release: migrators queue on this advisory lock.
_MIGRATORS = 7_305_411
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS, _HOST_SECONDS = 60.0, 5.0


def _url() -> DatabaseUrl:
    url: str = context.config.attributes.get("url") or Settings().database_url.get_secret_value()
    return database_url(url)


def _is_ours(_object: object, name: str | None, kind: str, _reflected: bool, _other: object) -> bool:  # noqa: FBT001 - alembic's signature
    return not (kind == "table" and name is not None and name.startswith("event_"))


def _run(progress: Progress, connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        version_table=context.config.attributes.get("version_table", "alembic_version"),
        include_object=_is_ours,
        on_version_apply=progress,
    )
    with context.begin_transaction():
        context.run_migrations()


async def _roll_back(connection: AsyncConnection) -> None:
    await connection.rollback()
    await connection.execute(text("RESET lock_timeout"))  # an index build that failed had no limit
    await connection.commit()


async def _main() -> None:
    patience = context.config.attributes.get("patience") or Patience()
    connect = partial(
        open_connection, _url(), timeout=_CONNECT_SECONDS, host_timeout=_HOST_SECONDS, server_settings=patience.session
    )
    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    async with engine.connect() as connection:
        # Whoever waited for the lock inside PostgreSQL would hold a snapshot, which a revision that makes an index
        # concurrently waits for.
        waits = False
        while not await connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _MIGRATORS}):
            await connection.commit()
            if not waits:
                patience.report("Another migration runs. This one waits for its end.")
            waits = True
            await asyncio.sleep(_LOOK_SECONDS)
        pid: int = await connection.scalar(text("SELECT pg_backend_pid()"))
        await connection.commit()
        progress = context.config.attributes.get("progress") or Progress()
        run = partial(connection.run_sync, partial(_run, progress))
        await run_patiently(run, progress, partial(_roll_back, connection), pid, connect, patience)
        await connection.commit()
    await engine.dispose()


asyncio.run(_main())
