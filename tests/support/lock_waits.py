"""Waits until a session of the test's database waits for a lock that another session holds."""

from __future__ import annotations

import asyncio

from leasehold.db.database import Connection

_PATIENCE_SECONDS = 60.0
#: Other tests of this server may wait for locks, too. A row's lock names no database, but the session that waits for it
#: has locked a table of its database. (pg_stat_activity would not do: within a transaction its answer stays the same.)
_WAITING = """
SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted AND ($1 = '' OR locktype = $1) AND pid IN (
    SELECT pid FROM pg_locks WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


async def until_waiting(connection: Connection, sessions: int = 1, *, kind: str = "") -> None:
    """Wait until so many sessions of the connection's database wait for a lock. `kind`: only locks of this `locktype`.

    Raises TimeoutError after a minute.
    """
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while await connection.fetchval(_WAITING, kind) < sessions:
            await asyncio.sleep(0.01)
