"""Adapters for the connections of the user's program. An adapter wraps such a connection, and has the methods of
asyncpg that the platform's statements use. The functions of statements.py convert each statement, its arguments and its
rows for the driver.

Only the user's program begins, commits and rolls back the transaction. An adapter never does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any, TypeVar

from leasehold.app.drivers.statements import (
    for_asyncpg,
    for_psycopg,
    for_sqlalchemy,
    named_parameters,
    parameter,
    row_of,
)
from leasehold.domain.errors import TransactionRefused

T = TypeVar("T")  # what the coroutine of `run_now` returns
Row = dict[str, Any]  # the name of a column -> its value
#: PostgreSQL's error code for a statement in a transaction that has failed.
_FAILED_SQLSTATE = "25P02"
_FAILED_SENTENCE = "the transaction has failed, so nothing can be written in it: roll it back, and submit in a new one"


class Adapter(ABC):
    """The user's connection, with asyncpg's methods. `is_sync`: whether the driver blocks its thread. Even then the
    adapter's methods are coroutines, but these never wait for an event loop. So `run_now` can run them without a loop.
    """

    is_sync = False

    @abstractmethod
    async def _rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Row]: ...

    @abstractmethod
    async def check(self) -> None:
        """Raises TransactionRefused if the connection is not in a transaction, or the transaction has failed."""

    def on_commit(self, announce: Callable[[], None]) -> None:  # noqa: B027 - most drivers do not report a commit
        """Call `announce` after the user's transaction has committed, if the driver reports commits. `announce` tells
        workers of the new tasks. It does not block, and raises nothing. If `announce` is called without a commit, no
        harm is done, because workers then only look for tasks that do not exist.
        """

    def is_in_transaction(self) -> bool:
        """Always True, because `check` refuses a connection that is not in a transaction."""
        return True

    async def fetch(self, statement: str, *arguments: Any) -> list[Row]:
        try:
            return await self._rows(statement, arguments)
        except Exception as error:
            if sqlstate_of(error) == _FAILED_SQLSTATE or type(error).__name__ == "PendingRollbackError":
                raise TransactionRefused(_FAILED_SENTENCE) from error
            raise

    async def fetchrow(self, statement: str, *arguments: Any) -> Row | None:
        return next(iter(await self.fetch(statement, *arguments)), None)

    async def fetchval(self, statement: str, *arguments: Any) -> Any:
        row = await self.fetchrow(statement, *arguments)
        return None if row is None else next(iter(row.values()))

    async def execute(self, statement: str, *arguments: Any) -> None:
        await self.fetch(statement, *arguments)


def sqlstate_of(error: BaseException) -> str | None:
    """PostgreSQL's error code (SQLSTATE) in a driver's error, or in the driver's error that SQLAlchemy wraps. None if
    the error has no code.
    """
    for candidate in (error, getattr(error, "orig", None), error.__cause__):
        code = getattr(candidate, "sqlstate", None) or getattr(candidate, "pgcode", None)
        if code is not None:
            return str(code)
    return None


class Asyncpg(Adapter):
    """An asyncpg.Connection, or a connection that an asyncpg pool has lent."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def check(self) -> None:
        if not self._connection.is_in_transaction():
            raise TransactionRefused("asyncpg commits each statement by itself: wrap it in connection.transaction()")

    async def _rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Row]:
        values = [parameter(value) for value in arguments]
        rows = await self._connection.fetch(for_asyncpg(statement), *values)
        return [row_of(row.keys(), row.values()) for row in rows]


class _Psycopg(Adapter):
    # The check of both kinds of psycopg connections.
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def check(self) -> None:
        status = self._connection.info.transaction_status.name
        if status == "INERROR":
            raise TransactionRefused(_FAILED_SENTENCE)
        if self._connection.autocommit and status == "IDLE":
            raise TransactionRefused(
                "the connection is in autocommit: wrap it in connection.transaction(), or with Django in"
                " transaction.atomic()"
            )


class Psycopg(_Psycopg):
    """A psycopg.Connection. It may be the connection inside a connection of Django; `wrapper` is then Django's
    connection.
    """

    is_sync = True
    wrapper: Any = None

    def on_commit(self, announce: Callable[[], None]) -> None:
        # Outside a transaction, Django would call `announce` immediately.
        if getattr(self.wrapper, "in_atomic_block", False):
            self.wrapper.on_commit(announce)

    async def _rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Row]:
        with self._connection.cursor(row_factory=_tuple_rows) as cursor:
            cursor.execute(for_psycopg(statement), named_parameters(arguments))
            if cursor.description is None:
                return []
            column_names = [column.name for column in cursor.description]
            return [row_of(column_names, values) for values in cursor.fetchall()]


class AsyncPsycopg(_Psycopg):
    """A psycopg.AsyncConnection."""

    async def _rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Row]:
        async with self._connection.cursor(row_factory=_tuple_rows) as cursor:
            await cursor.execute(for_psycopg(statement), named_parameters(arguments))
            if cursor.description is None:
                return []
            column_names = [column.name for column in cursor.description]
            return [row_of(column_names, values) for values in await cursor.fetchall()]


def _tuple_rows(_cursor: Any) -> Callable[[Any], tuple[Any, ...]]:
    """A row factory for psycopg. It is used in place of the row factory of the user's connection, which may make
    objects of any type.
    """
    return tuple


#: With these two statements, `check` finds out whether the connection is in a transaction. The first sets a variable of
#: PostgreSQL until the transaction ends, and the second reads it. With autocommit, the transaction ends with the first
#: statement, so the second does not find the variable.
_SET_MARK = "SELECT set_config('leasehold.in_transaction', '1', true)"
_READ_MARK = "SELECT current_setting('leasehold.in_transaction', true)"
_AUTOCOMMIT_SENTENCE = (
    "the connection is in autocommit: submit inside a transaction (isolation_level is not AUTOCOMMIT)"
)


#: `session.info[_PENDING]` of a SQLAlchemy session: the functions to call after its commit.
_PENDING = "leasehold.announce_after_commit"


def _after_commit(session: Any) -> None:
    if not session.in_nested_transaction():  # the release of a savepoint commits nothing
        announcements, session.info[_PENDING] = session.info[_PENDING], []
        for announce in announcements:
            announce()


def _after_rollback(session: Any) -> None:
    if not session.in_nested_transaction():
        session.info[_PENDING] = []


class _SqlAlchemy(Adapter):
    # The methods that the two kinds of SQLAlchemy connections have in common.
    _user_connection: Any

    def on_commit(self, announce: Callable[[], None]) -> None:
        """A Session reports its commit. A Connection does not, because its event `commit` comes before the commit."""
        from sqlalchemy import event  # noqa: PLC0415 - the user's program has loaded SQLAlchemy

        session = getattr(self._user_connection, "sync_session", self._user_connection)
        if not hasattr(session, "flush"):  # a Connection
            return
        if _PENDING not in session.info:
            event.listen(session, "after_commit", _after_commit)
            event.listen(session, "after_rollback", _after_rollback)
        session.info.setdefault(_PENDING, []).append(announce)

    async def check(self) -> None:
        await self.fetchval(_SET_MARK)
        if await self.fetchval(_READ_MARK) != "1":
            raise TransactionRefused(_AUTOCOMMIT_SENTENCE)


class SqlAlchemy(_SqlAlchemy):
    """A Session or a Connection of SQLAlchemy, on any of its drivers."""

    is_sync = True

    def __init__(self, connection: Any) -> None:
        self._user_connection = connection

    @cached_property
    def _connection(self) -> Any:
        """The connection to use. A statement on a session itself would first flush the session's objects."""
        is_session = callable(self._user_connection.connection)  # a method of a Session, a property of a Connection
        return self._user_connection.connection() if is_session else self._user_connection

    async def _rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Row]:
        return _rows_of(self._connection.execute(_text(statement), named_parameters(arguments)))


class AsyncSqlAlchemy(_SqlAlchemy):
    """An AsyncSession or an AsyncConnection of SQLAlchemy."""

    def __init__(self, connection: Any) -> None:
        self._user_connection = connection
        self._connection: Any = None if hasattr(connection, "sync_session") else connection

    async def _rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Row]:
        if self._connection is None:
            self._connection = await self._user_connection.connection()
        return _rows_of(await self._connection.execute(_text(statement), named_parameters(arguments)))


def _text(statement: str) -> Any:
    from sqlalchemy import text  # noqa: PLC0415 - the user's program has loaded SQLAlchemy

    return text(for_sqlalchemy(statement))


def _rows_of(result: Any) -> list[Row]:
    return [row_of(result.keys(), row) for row in result.fetchall()] if result.returns_rows else []


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end without an event loop. Its statements use a sync driver, which blocks. So the
    coroutine never waits for a loop.
    """
    try:
        while True:
            if work.send(None) is not None:  # sleep(0) yields None
                raise RuntimeError("a statement on a sync connection waited for an event loop")
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        work.close()
