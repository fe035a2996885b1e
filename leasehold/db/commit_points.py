"""Puts a failpoint after each commit of a process: `commit.NAME`. Tests of crashes stop or kill the process there.

In a request to the API, NAME is the operation (`commit.createRun`), so a new endpoint gets a failpoint without further
code. Elsewhere NAME is the name of the connection (`commit.api_submissions`). A new connection has the class
CommitPoints only if a failpoint of this kind is armed.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeVar

from leasehold.db.failover import WatchedConnection
from leasehold.runtime import failpoints

_Answer = TypeVar("_Answer")
#: Matches a statement that writes. Outside a transaction, PostgreSQL commits such a statement immediately. `SELECT ...
#: FOR UPDATE` only locks, so it does not match.
_WRITES = re.compile(r"\b(INSERT INTO|DELETE FROM|MERGE INTO|(?<!FOR )(?<!FOR NO KEY )UPDATE)\b", re.IGNORECASE)
#: The function that names the commits of the current request; None: outside of a request.
_operation: ContextVar[Callable[[], str | None] | None] = ContextVar("operation", default=None)


def name_commits(operation: Callable[[], str | None]) -> None:
    """Let `operation` name the commits of the current request. The failpoint calls `operation` after each commit. If
    `operation` returns None, NAME is the name of the connection.
    """
    _operation.set(operation)


def connection_class() -> type[WatchedConnection]:
    return CommitPoints if failpoints.has_commit_points() else WatchedConnection


class CommitPoints(WatchedConnection):
    """A connection with a failpoint after each commit."""

    # WatchedConnection sends every statement by this method.
    async def _carry_out(self, query: str, statement: Awaitable[_Answer]) -> _Answer:
        was_in_transaction = self.is_in_transaction()
        answer = await super()._carry_out(query, statement)
        # In a transaction only COMMIT commits. Outside, each statement that writes commits.
        commits = query.startswith("COMMIT") if was_in_transaction else _WRITES.search(query) is not None
        if commits and not self.is_in_transaction():
            failpoints.reach(failpoints.COMMIT + self._name())
        return answer

    def _name(self) -> str:
        operation = _operation.get()
        name = operation() if operation is not None else None
        return name or self.get_settings().application_name.removeprefix("leasehold ").replace(" ", "_")
