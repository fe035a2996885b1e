"""The one clock by which instants are compared that several processes read: the database's."""

from __future__ import annotations

from datetime import datetime

from leasehold.db.database import Connection


async def database_time(connection: Connection) -> datetime:
    """The time now by the database's clock. The clocks of APIs and workers may be wrong by hours."""
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    return now
