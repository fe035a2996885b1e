"""Chooses the server of a connection: the first host of the URL that answers and takes writes. For a replica: the first
host that answers and only reads.

After a failover an address may lead to a server that only reads: a standby that is not promoted yet, or the former
primary. Connections to it do not break, so a pool would keep them for ever: `Leaving` makes the pool open new ones.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from leasehold.urls import DatabaseUrl

_Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
_Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

#: Seconds between two attempts of a pool on the wrong server to open new connections. Reads go on meanwhile.
_LEAVE_SECONDS = 1.0
#: PostgreSQL 14 and later report these settings to the client, at the start of a session and at each change.
_REPORTED = ("in_hot_standby", "default_transaction_read_only")
#: (URL, whether for a replica) -> the host that was chosen last. The next connection tries it first: otherwise it would
#: wait for a silent host each time.
_last_chosen: dict[tuple[DatabaseUrl, bool], tuple[str, int]] = {}
_NEXT_HOST = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


async def open_connection(
    url: DatabaseUrl, *, timeout: float, host_timeout: float, replica: bool = False, **options: Any
) -> _Connection:
    """Open a connection to the first host that takes writes; if none does, to the first that answers.

    `timeout`: seconds for all hosts together. `host_timeout`: for each of several hosts. `replica`: the wanted host is
    one that only reads. `options`: asyncpg's.

    Raises what the last host raised, or TimeoutError.
    """
    if len(url.hosts) < 2:  # noqa: PLR2004 - one host, or what asyncpg finds in the environment
        host, port = url.hosts[0] if url.hosts else (None, None)
        return await _connect(url, host, port, timeout, options)
    opened: list[_Connection] = []
    chosen: _Connection | None = None
    error: BaseException = TimeoutError()
    try:
        async with asyncio.timeout(timeout):
            for host, port in _in_order(url, replica=replica):
                try:
                    opened.append(await _connect(url, host, port, host_timeout, options))
                    takes_writes = await _takes_writes(opened[-1], host_timeout)
                except _NEXT_HOST as refused:
                    error = refused
                    continue
                if takes_writes is not replica:
                    chosen = opened[-1]
                    _last_chosen[url, replica] = (host, port)
                    return chosen
    except TimeoutError as late:
        error = late
    else:
        chosen = opened[0] if opened else None
    finally:
        for connection in opened:
            if connection is not chosen:
                connection.terminate()
    if chosen is None:
        raise error
    return chosen


async def _connect(
    url: DatabaseUrl, host: str | None, port: int | None, timeout: float, options: dict[str, Any]
) -> _Connection:
    """Connect to one host. If a pooler there refuses settings at the start of a session, connect again with the
    application's name alone. poolers.py then checks that the database role has these settings.
    """
    try:
        connection: _Connection = await asyncpg.connect(url.dsn, host=host, port=port, timeout=timeout, **options)
    except asyncpg.ProtocolViolationError as refused:
        if "startup parameter" not in str(refused):
            raise
        name = {"application_name": options.get("server_settings", {}).get("application_name", "leasehold")}
        options = options | {"server_settings": name}
        connection = await asyncpg.connect(url.dsn, host=host, port=port, timeout=timeout, **options)
    return connection


def _in_order(url: DatabaseUrl, *, replica: bool) -> list[tuple[str, int]]:
    """The hosts in the order in which they are tried: the one that was chosen last comes first."""
    return sorted(url.hosts, key=lambda host: host != _last_chosen.get((url, replica)))


async def _takes_writes(connection: _Connection, timeout: float) -> bool:
    """Whether the host takes writes. A pooler may report nothing: then query it, for at most `timeout` seconds."""
    if hasattr(connection.get_settings(), _REPORTED[0]):
        return not only_reads(connection)
    query = "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only') = 'on'"
    reads_only: bool = await connection.fetchval(query, timeout=timeout)
    return not reads_only


def only_reads(connection: _Connection | PoolConnectionProxy[asyncpg.Record]) -> bool:
    """Whether the server has reported that it only reads. A server before PostgreSQL 14 reports nothing."""
    reported = connection.get_settings()
    return any(getattr(reported, name, "off") == "on" for name in _REPORTED)


def _is_primary(connection: PoolConnectionProxy[asyncpg.Record]) -> bool:
    """Whether the server has reported that it is no standby. A pooler may report nothing."""
    return getattr(connection.get_settings(), _REPORTED[0], "on") == "off"


class Leaving:
    """Makes a pool open new connections when its server is of the wrong sort: it only reads, or, for the pool of a
    replica, it takes writes. Call it with each connection that the pool lends.
    """

    def __init__(self, *, replica: bool = False) -> None:
        self._replica = replica
        self._again_at = 0.0

    async def __call__(self, pool: _Pool, connection: PoolConnectionProxy[asyncpg.Record]) -> None:
        if not (_is_primary(connection) if self._replica else only_reads(connection)):
            return
        now = asyncio.get_running_loop().time()
        if now >= self._again_at:
            self._again_at = now + _LEAVE_SECONDS
            await pool.expire_connections()  # this connection serves once more; the pool's next ones are new
