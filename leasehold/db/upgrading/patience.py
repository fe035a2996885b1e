"""Runs revisions (migrations) beside a running installation, and tries again when a table lock is not free.

While a statement waits for a strong lock, every later statement on the same table waits behind it. So a statement of a
revision waits for one second only (`Patience.lock_seconds`). After this second, PostgreSQL refuses the lock, and the
later statements go on. After a pause, `run_patiently` tries the revision again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncpg
from sqlalchemy.exc import SQLAlchemyError

from leasehold.domain.errors import SchemaLocked
from leasehold.runtime.gather import cancel_and_wait

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationInfo

#: These errors mean that a lock was not free. The revision is then tried again.
_LOCK_NOT_FREE = (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError)
#: Errors of PostgreSQL, or of the connection to it.
_SERVER_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
#: Seconds between two tries: the first pause, and the longest pause. Each try doubles the pause, up to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 1.0
#: How many times `_watch_blockers` looks for the holders of locks while one statement waits.
_SAMPLES = 5
#: SQL: one sentence about each session that holds a lock for which the session $1 waits. The sentences leave out the
#: texts of queries, which may contain data of clients.
_BLOCKERS = """
SELECT format('%s (process %s, %s, for %s s)', coalesce(nullif(application_name, ''), usename), pid, state,
    round(extract(epoch FROM clock_timestamp() - coalesce(xact_start, query_start, backend_start))))
FROM pg_stat_activity WHERE pid = ANY(pg_blocking_pids($1)) ORDER BY xact_start LIMIT 3
"""

#: A function that opens a new session with the database.
Connect = Callable[[], Awaitable["asyncpg.Connection[asyncpg.Record]"]]


def _report_nothing(_sentence: str) -> None:
    """The default of `Patience.report`."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a migration waits. `lock_seconds`: how long a statement waits for a lock. `seconds`: for how long the
    migration goes on trying one revision. `report`: called with a sentence each time that the migration has to wait.
    """

    lock_seconds: float = 1.0
    seconds: float = 60.0
    report: Callable[[str], None] = _report_nothing

    @property
    def session(self) -> dict[str, str]:
        """Settings of the session that migrates. With client_connection_check_interval, PostgreSQL ends the session of
        a program that died. Without this setting, an index build of that program would go on, and the next migration
        would wait for it. lock_timeout is at least 1 ms, because with 0 statements would wait without end.
        """
        return {
            "application_name": "leasehold migrate",
            "lock_timeout": f"{max(1.0, self.lock_seconds * 1000):.0f}ms",
            "client_connection_check_interval": "1s",
        }


class Progress:
    """Records the revisions that the migration applies. Alembic calls the object after each revision. `applied`: how
    many revisions the migration has applied so far. `before`: the schema's revision before the first of them; None: the
    schema was empty. `after`: the latest of them.
    """

    def __init__(self) -> None:
        self.applied = 0
        self.before: str | None = None
        self.after: str | None = None

    def __call__(self, ctx: object, step: MigrationInfo, heads: object, run_args: object) -> None:  # noqa: ARG002 - alembic's signature
        if not self.applied:
            self.before = next(iter(step.down_revision_ids), None)
        self.after = step.up_revision_id
        self.applied += 1


async def run_patiently(
    run: Callable[[], Awaitable[None]],
    progress: Progress,
    roll_back: Callable[[], Awaitable[None]],
    pid: int,
    connect: Connect,
    patience: Patience,
) -> None:
    """Run the revisions. If a lock is not free, call `roll_back` and run the revisions again. Revisions that were
    committed stay, and each revision has `patience.seconds` of its own.

    `pid`: the process id of the session that runs the revisions. `connect` opens another session, which looks for the
    holders of locks. Raises SchemaLocked, or asyncpg's error.
    """
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + patience.seconds, _FIRST_PAUSE
    is_watched = False
    async with AsyncExitStack() as stack:
        blockers: list[str] = []
        while True:
            applied_before = progress.applied
            if await _try_to_run(run):
                return
            await roll_back()
            if progress.applied > applied_before:  # the next revision has its own `patience.seconds`
                deadline, pause = loop.time() + patience.seconds, _FIRST_PAUSE
            if loop.time() + pause >= deadline:
                raise SchemaLocked(patience.seconds, blockers)
            patience.report("A table is in use. The migration lets others through, and tries again.")
            if not is_watched:
                is_watched = True
                await stack.enter_async_context(_watch_blockers(pid, connect, patience, blockers))
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


async def _try_to_run(run: Callable[[], Awaitable[None]]) -> bool:
    """Run the revisions. Returns False if a lock was not free. Raises asyncpg's error for any other failure."""
    try:
        await run()
    except SQLAlchemyError as error:
        cause = _cause_of(error)
        if not isinstance(cause, _LOCK_NOT_FREE):
            raise cause from None
        return False
    return True


def _cause_of(error: BaseException) -> BaseException:
    """The error of PostgreSQL, or of the connection, that caused SQLAlchemy's error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _SERVER_ERRORS):
        cause = cause.__cause__ or getattr(cause, "orig", None) or cause.__context__
    return cause or error


@asynccontextmanager
async def _watch_blockers(pid: int, connect: Connect, patience: Patience, blockers: list[str]) -> AsyncIterator[None]:
    """During the block, store in `blockers` the sessions that last blocked the session `pid`, as sentences. An error
    ends only the watch, and not the block. For example, PostgreSQL may have no connection left for the watch.
    """

    async def watch() -> None:
        connection = await connect()
        try:
            while True:
                if rows := await connection.fetch(_BLOCKERS, pid):
                    blockers[:] = [row[0] for row in rows]
                await asyncio.sleep(patience.lock_seconds / _SAMPLES)
        finally:
            connection.terminate()

    watch_task = asyncio.create_task(watch())
    try:
        yield
    finally:
        await cancel_and_wait(watch_task)
