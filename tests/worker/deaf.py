"""A connection that loses an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from leasehold.db.database import Connection

Meanwhile = Callable[[], Awaitable[object]]


async def _nothing() -> None:
    return


class Deaf:
    """A connection whose first answer is lost, after PostgreSQL has committed what was asked."""

    def __init__(self, connection: Connection, lost: list[str], meanwhile: Meanwhile = _nothing) -> None:
        self._connection, self._lost, self._meanwhile = connection, lost, meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def fetch(self, statement: str, *arguments: Any) -> Any:
        answer = await self._connection.fetch(statement, *arguments)
        if not self._lost:
            self._lost.append(statement)
            await self._meanwhile()
            raise ConnectionError
        return answer
