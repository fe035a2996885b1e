"""Alembic's environment: asynchronous, with one transaction for each revision, and one migrator at a time."""

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

# Import the modules that define the tables of the platform's revisions. A module adds its tables to `metadata` when it
# is imported. For a table that `metadata` lacks, Alembic's autogenerate would write a revision that drops the table.
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

#: The key of the advisory lock that the running migrator holds. The number has no meaning, but it must never change,
#: because migrators of all releases use this lock.
_MIGRATORS = 7_305_411
#: Seconds between two tries to take this lock.
_LOOK_SECONDS = 0.2
#: A connection must open within these seconds. The first number is for all hosts of the URL together, the second for
#: each host.
_CONNECT_SECONDS, _HOST_SECONDS = 60.0, 5.0


def _url() -> DatabaseUrl:
    url: str = context.config.attributes.get("url") or Settings().database_url.get_secret_value()
    return database_url(url)


# Autogenerate compares the object with `metadata`, unless it is a partition `event_...` (leasehold/db/history.py).
def _is_ours(
    _object: object,
    name: str | None,
    kind: str,
    _reflected: bool,  # noqa: FBT001 - Alembic's signature
    _other: object,
) -> bool:
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
    await connection.execute(text("RESET lock_timeout"))  # a failed index build has left it at 0 (no limit)
    await connection.commit()


async def _main() -> None:
    patience = context.config.attributes.get("patience") or Patience()
    connect = partial(
        open_connection, _url(), timeout=_CONNECT_SECONDS, host_timeout=_HOST_SECONDS, server_settings=patience.session
    )
    engine = create_async_engine("postgresql+asyncpg://", async_creator=connect, poolclass=NullPool)
    async with engine.connect() as connection:
        # Ask for the lock again and again, instead of waiting for it inside PostgreSQL. A session that waits there
        # holds a snapshot. The migrator that has the lock may be in a revision that makes an index concurrently, and
        # that revision would wait for the end of the snapshot.
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
