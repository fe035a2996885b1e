"""The database's clock. It is the only clock for instants that several processes compare."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Self

from leasehold.db.database import Connection


async def database_time(connection: Connection) -> datetime:
    """The time now by the database's clock. The clocks of the machines of APIs and workers may be wrong by hours."""
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    return now


@dataclass(frozen=True, slots=True)
class DatabaseClock:
    """The database's clock, read once. This process measures the time since then, so `time` costs no statement."""

    _read: float  # Unix time
    _read_at: float  # by the clock of this process

    @classmethod
    async def read(cls, connection: Connection) -> Self:
        return cls((await database_time(connection)).timestamp(), monotonic())

    def time(self) -> float:
        """Unix time."""
        return self._read + monotonic() - self._read_at
