"""Chooses the server of a connection. It is the first host of the URL that answers and takes writes. For a connection
to a replica, it is the first host that answers and only reads. database.py opens every connection and every pool with
this module.

After a failover an address may lead to a server that only reads: a standby that is not promoted yet, or the former
primary. Connections to such a server do not break, so a pool would keep them for ever. `WrongServerGuard` makes the
pool open new connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakValueDictionary

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from leasehold.db.failover import FailoverWatch, Host, WatchedConnection
from leasehold.urls import DatabaseUrl

_Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
_Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"

#: While a pool is on the wrong server, it replaces its connections at most once in this many seconds. In between, its
#: connections serve reads.
_REPLACE_SECONDS = 1.0
#: PostgreSQL 14 and later report these settings to the client, at the start of a session and at each change.
_REPORTED = ("in_hot_standby", "default_transaction_read_only")
#: (URL, whether for a replica) -> the host that was chosen last. The next connection tries this host first. Otherwise
#: each connection would wait for a silent host that the URL names earlier.
_last_chosen: dict[tuple[DatabaseUrl, bool], Host] = {}
#: (URL, whether for a replica) -> the number of calls of `open_connection` in which a host was late. A host is late if
#: it does not answer within `host_timeout`. The number goes back to zero when a call finds a server that does what the
#: caller needs.
_late_calls: dict[tuple[DatabaseUrl, bool], int] = {}
#: `open_connection` doubles `host_timeout` at most this many times.
_MOST_DOUBLINGS = 10
#: After one of these errors at a host, `_choose` tries the next host.
_HOST_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
#: SQL: the timeline of a server that takes writes, or null. The name of each WAL file begins with the timeline.
_TIMELINE = """
SELECT CASE WHEN NOT pg_is_in_recovery()
    THEN ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint END
"""
#: (id of the event loop, URL) -> the watch of the sessions (connections) that this loop has opened to this URL. A watch
#: lives as long as one of its sessions.
_watches: WeakValueDictionary[tuple[int, DatabaseUrl], FailoverWatch] = WeakValueDictionary()
#: When the watch queries a host's timeline, the host has this many seconds to accept the connection, and again this
#: many to answer.
_QUESTION_SECONDS = 1.0


async def open_connection(
    url: DatabaseUrl, *, timeout: float, host_timeout: float, replica: bool = False, **options: Any
) -> WatchedConnection:
    """Open a connection to the first host that takes writes. If no host takes writes, open a connection to the first
    host that answers.

    `replica`: prefer a host that only reads. `timeout`: seconds for all hosts together. `host_timeout`: seconds for
    each host, if the URL names several. `options`: asyncpg's options.

    If a host does not answer in its time, and no other host takes writes, the next call gives each host twice the time,
    but at most `timeout` divided by the number of hosts. The reason: after a failover all processes connect at once,
    and the new primary is slow. If every process always gave up after the same short time, perhaps none would ever
    connect. With `replica`, a call that connected to any host counts as a success, so the time is not doubled.

    FailoverWatch (failover.py) ends the connection if its server does not answer and another server was promoted. So a
    `connection_class` among the options must extend WatchedConnection. FailoverWatch does not watch connections to
    replicas.

    If no host answers, raises the TimeoutError of the first host that was late. If no host was late, raises the error
    of the last host.
    """
    watch = None if replica else _watch_of(url)
    if len(url.hosts) < 2:  # noqa: PLR2004 - one host, or what asyncpg finds in the environment
        host, port = _hosts_of(url)[0]
        async with asyncio.timeout(timeout):
            only = await _connect(url, host, port, timeout, options)
            await _add(watch, only, (host, port), timeout)
        return only
    late_calls = _late_calls.get((url, replica), 0)
    longest = max(host_timeout, timeout / len(url.hosts))
    host_timeout = min(host_timeout * 2**late_calls, longest)
    answers = _Answers()
    chosen: WatchedConnection | None = None
    try:
        async with asyncio.timeout(timeout):
            chosen = await _choose(url, answers, host_timeout, options, watch)
    except TimeoutError as late:  # `timeout` is over, or no host answered and at least one was late
        answers.late = late
        raise
    finally:
        if answers.has_found:
            _late_calls.pop((url, replica), None)
        elif answers.late is not None and not (replica and answers.opened):
            _late_calls[url, replica] = min(late_calls + 1, _MOST_DOUBLINGS)
        for connection in answers.opened:
            if connection is not chosen:
                connection.terminate()
    return chosen


@dataclass(slots=True)
class _Answers:
    """What the hosts answered in one call. `opened`: every connection; the caller closes the connections that are not
    chosen. `late`: the error of the first host that did not answer in its time. `has_found`: whether the chosen host
    does what the caller needs. It must take writes or, for a connection to a replica, only read.
    """

    opened: list[WatchedConnection] = field(default_factory=list)
    late: TimeoutError | None = None
    has_found: bool = False


async def _choose(
    url: DatabaseUrl, answers: _Answers, host_timeout: float, options: dict[str, Any], watch: FailoverWatch | None
) -> WatchedConnection:
    """Do the work of `open_connection` for several hosts, without the limit `timeout`. Record in `answers` what the
    hosts answered. `watch`: None for a connection to a replica.
    """
    error: BaseException | None = None
    replica = watch is None
    for host, port in _last_chosen_first(url, replica=replica):
        try:
            async with _limited(watch, (host, port)):
                connection = await _connect(url, host, port, host_timeout, options)
                answers.opened.append(connection)
                takes_writes = await _takes_writes(connection, host_timeout)
                await _add(watch, connection, (host, port), host_timeout)
        except TimeoutError as late:
            answers.late = answers.late or late
            continue
        except _HOST_ERRORS as host_error:
            error = host_error
            continue
        # Whether the host does what the caller needs: only read for a replica, otherwise take writes.
        does_its_task = not takes_writes if replica else takes_writes
        if does_its_task:
            _last_chosen[url, replica] = (host, port)
            answers.has_found = True
            return connection
    if answers.opened:
        return answers.opened[0]
    last_error = answers.late or error
    assert last_error is not None
    raise last_error


@asynccontextmanager
async def _limited(watch: FailoverWatch | None, host: Host) -> AsyncIterator[None]:
    """Raise TimeoutError in the block as soon as the watch finds that another host is the primary."""
    if watch is None:
        yield
        return
    async with asyncio.timeout(None) as limit:
        with watch.opening(host, limit):
            yield


def _watch_of(url: DatabaseUrl) -> FailoverWatch:
    """The watch for the sessions of the running event loop with the servers of this URL."""
    loop = asyncio.get_running_loop()
    watch = _watches.get((id(loop), url))
    if watch is None or watch.loop is not loop:  # a later loop may have the same id
        watch = FailoverWatch(loop, _hosts_of(url), partial(_timeline_of, url), partial(_prefer, url))
        _watches[id(loop), url] = watch
    return watch


async def _add(watch: FailoverWatch | None, connection: WatchedConnection, host: Host, timeout: float) -> None:
    """Let the watch end this connection when another server has replaced the connection's server. `timeout`: seconds
    for the query of the server's timeline. If the query fails, close the connection and raise the error.
    """
    if watch is None:
        return
    try:
        watch.add(connection, host, await _read_timeline(connection, timeout))
    except BaseException:
        connection.terminate()
        raise
    connection.watch = watch


async def _timeline_of(url: DatabaseUrl, host: Host) -> int | None:
    """Query the timeline of a host's server on a new connection. None: no answer, or the server takes no writes."""
    name = {"application_name": "leasehold failover"}
    try:
        options = {"server_settings": name, "statement_cache_size": 0}  # a pooler may not keep prepared statements
        connection = await _connect(url, *host, _QUESTION_SECONDS, options)
        try:
            return await _read_timeline(connection, _QUESTION_SECONDS)
        finally:
            connection.terminate()
    except _HOST_ERRORS:
        return None


async def _read_timeline(connection: _Connection, timeout: float) -> int | None:
    """The timeline of the connection's server. None: a standby, or a server that lacks the functions of _TIMELINE."""
    try:
        timeline: int | None = await connection.fetchval(_TIMELINE, timeout=timeout)
    except asyncpg.PostgresError:  # a service that has replaced PostgreSQL's log may lack these functions
        return None
    return timeline


def _prefer(url: DatabaseUrl, host: Host) -> None:
    # The watch calls this when it has found the new primary.
    _last_chosen[url, False] = host


async def _connect(
    url: DatabaseUrl, host: str | None, port: int | None, timeout: float, options: dict[str, Any]
) -> WatchedConnection:
    """Connect to one host. If a pooler there refuses settings at the start of a session, connect again with the
    application's name alone. poolers.py then checks that the database role has these settings.
    """
    options = {"connection_class": WatchedConnection} | options
    try:
        connection = await asyncpg.connect(url.dsn, host=host, port=port, timeout=timeout, **options)
    except asyncpg.ProtocolViolationError as refused:
        if "startup parameter" not in str(refused):
            raise
        name = {"application_name": options.get("server_settings", {}).get("application_name", "leasehold")}
        options = options | {"server_settings": name}
        connection = await asyncpg.connect(url.dsn, host=host, port=port, timeout=timeout, **options)
    return cast("WatchedConnection", connection)


def _hosts_of(url: DatabaseUrl) -> Sequence[Host]:
    """The hosts of the URL. If the URL names none, this is the host that asyncpg finds in the environment."""
    return url.hosts or ((None, None),)


def _last_chosen_first(url: DatabaseUrl, *, replica: bool) -> list[Host]:
    """The hosts of the URL: first the host that was chosen last, then the others in the order of the URL."""
    return sorted(_hosts_of(url), key=lambda host: host != _last_chosen.get((url, replica)))


async def _takes_writes(connection: _Connection, timeout: float) -> bool:
    """Whether the host takes writes. If the host (or a pooler) has not reported this, query it, within `timeout`."""
    if hasattr(connection.get_settings(), _REPORTED[0]):
        return not only_reads(connection)
    query = "SELECT pg_is_in_recovery() OR current_setting('default_transaction_read_only') = 'on'"
    reads_only: bool = await connection.fetchval(query, timeout=timeout)
    return not reads_only


def only_reads(connection: _Connection | PoolConnectionProxy[asyncpg.Record]) -> bool:
    """Whether the server has reported that it only reads. A server before PostgreSQL 14 reports nothing."""
    reported = connection.get_settings()
    return any(getattr(reported, name, "off") == "on" for name in _REPORTED)


def check_takes_writes(connection: _Connection | PoolConnectionProxy[asyncpg.Record]) -> None:
    """Raises asyncpg.ReadOnlySQLTransactionError (an error of TRY_AGAIN) if the server only reads. A standby answers
    reads, but it may lack the newest rows. So code that acts on the rows that it reads must not read from a standby.
    """
    if only_reads(connection):
        raise asyncpg.ReadOnlySQLTransactionError("no host takes writes")


def _is_primary(connection: PoolConnectionProxy[asyncpg.Record]) -> bool:
    """Whether the server has reported that it is not a standby. A pooler may report nothing."""
    return getattr(connection.get_settings(), _REPORTED[0], "on") == "off"


class WrongServerGuard:
    """Makes a pool replace its connections when they lead to the wrong server. For a pool to the primary, the wrong
    server is one that only reads. For a pool to a replica, it is a primary. The pool calls the guard with each
    connection before it lends the connection.
    """

    def __init__(self, *, replica: bool = False) -> None:
        self._replica = replica
        self._next_replacement = 0.0

    async def __call__(self, pool: _Pool, connection: PoolConnectionProxy[asyncpg.Record]) -> None:
        is_wrong = _is_primary(connection) if self._replica else only_reads(connection)
        if not is_wrong:
            return
        now = asyncio.get_running_loop().time()
        if now >= self._next_replacement:
            self._next_replacement = now + _REPLACE_SECONDS
            await pool.expire_connections()  # the pool still lends this connection now; the next one will be new
