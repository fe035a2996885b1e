"""Ends the sessions with a PostgreSQL server that does not answer, once another server was promoted in its place.

A primary that is frozen, or cut off from the network, closes no session. A statement would wait for its answer until
LEASEHOLD_DATABASE_TIMEOUT. So while a statement waits, `FailoverWatch` opens a new connection to every host of the URL,
and reads the timeline of the server there. A promotion begins a new timeline, with a higher number. If a server takes
writes, and its timeline is higher than that of a session's server, then it has replaced the session's server. The watch
then ends the session, and the session's owner connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import asyncpg
import structlog

if TYPE_CHECKING:
    _Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection
_Answer = TypeVar("_Answer")
#: The host and the port of a server. With (None, None), asyncpg finds both in the environment.
Host: TypeAlias = tuple[str | None, int | None]

log = structlog.get_logger(__name__)

#: When a statement, or the opening of a connection, has waited for this many seconds, the watch queries the timeline of
#: every host.
_PATIENCE_SECONDS = 1.0
#: The watch queries the hosts in rounds. A round ends after this many seconds at the latest, even if a host is silent.
#: So each host is queried again after _ROUND_SECONDS + _PAUSE_SECONDS at the latest.
_ROUND_SECONDS = 1.0
#: Seconds between two rounds. The rounds go on while a statement, or the opening of a connection, waits for longer than
#: _PATIENCE_SECONDS.
_PAUSE_SECONDS = 0.5


class Session(Protocol):
    """A connection, as far as the watch needs it."""

    def terminate(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Server:
    """The server of a session, as it was when the session began. `timeline`: if the server was a primary, its timeline;
    if it was a standby, the highest timeline of any server that the watch knew then.
    """

    host: Host
    timeline: int
    is_standby: bool


@dataclass(eq=False, slots=True)
class _Opening:
    """A connection to `host` that is being opened. `limit`: the timeout of the opening."""

    host: Host
    limit: asyncio.Timeout


class FailoverWatch:
    """Watches the sessions of one event loop with the servers of one URL."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hosts: Sequence[Host],
        timeline_of: Callable[[Host], Awaitable[int | None]],
        choose: Callable[[Host], None],
    ) -> None:
        """`timeline_of`: connects to a host and returns the timeline of its server; None if the server takes no writes,
        or does not answer. `choose`: makes new connections try this host first.
        """
        self._hosts = hosts
        self._timeline_of = timeline_of
        self._choose = choose
        self.loop = loop
        self._servers: WeakKeyDictionary[Session, _Server] = WeakKeyDictionary()
        #: Each session or opening that waits for its server -> the time at which the wait began, the oldest first.
        self._waiting: dict[Session | _Opening, float] = {}
        #: The highest timeline that a server has reported; 0: no server has reported one.
        self._newest = 0
        # At most one of the next two is set. If neither is, nothing waits.
        self._timer: asyncio.TimerHandle | None = None  # calls `_check_waits`; None: no call is planned
        self._asking: asyncio.Task[None] | None = None  # the asyncio task of the round that runs now

    def add(self, session: Session, host: Host, timeline: int | None) -> None:
        """Watch an open session with `host` until it is closed. `timeline`: None for a session with a standby."""
        self._newest = max(self._newest, timeline or 0)
        self._servers[session] = _Server(host, timeline or self._newest, is_standby=timeline is None)

    @contextmanager
    def opening(self, host: Host, limit: asyncio.Timeout) -> Iterator[None]:
        """Watch the block, which opens a connection to `host`. `limit`: the block's timeout. If the watch finds that
        another host is the primary, it makes this timeout expire immediately.
        """
        opening = _Opening(host, limit)
        self.begin(opening)
        try:
            yield
        finally:
            self.end(opening)

    def begin(self, waiting: Session | _Opening) -> None:
        """Record that `waiting` begins to wait for its server."""
        self._waiting[waiting] = self.loop.time()
        if self._timer is None and self._asking is None:
            self._timer = self.loop.call_later(_PATIENCE_SECONDS, self._check_waits)

    def end(self, waiting: Session | _Opening) -> None:
        """Record that `waiting` no longer waits."""
        self._waiting.pop(waiting, None)

    def _check_waits(self) -> None:
        """Query the hosts, if a session or an opening has waited for _PATIENCE_SECONDS. Otherwise check again later."""
        self._timer = None
        if not self._waiting:
            return  # the next `begin` sets the timer again
        remaining_seconds = next(iter(self._waiting.values())) + _PATIENCE_SECONDS - self.loop.time()
        if remaining_seconds > 0:
            self._timer = self.loop.call_later(remaining_seconds, self._check_waits)
        elif self._newest:
            # The new asyncio task gets an empty context. A context records which connections its asyncio task holds
            # (runtime/holding.py), and the new asyncio task holds none of those of the current context.
            self._asking = self.loop.create_task(self._ask(), context=Context())
        else:  # no server has reported its timeline, so there is nothing to compare an answer with
            self._timer = self.loop.call_later(_PATIENCE_SECONDS, self._check_waits)

    async def _ask(self) -> None:
        """Query all hosts at the same time, because a silent host alone would use up all of _ROUND_SECONDS."""
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_ROUND_SECONDS), asyncio.TaskGroup() as group:
                    for host in self._hosts:
                        group.create_task(self._ask_host(host))
        finally:  # also after an unforeseen error, because otherwise nothing would query the hosts again
            self._asking = None
            self._timer = self.loop.call_later(_PAUSE_SECONDS, self._check_waits)

    async def _ask_host(self, host: Host) -> None:
        timeline = await self._timeline_of(host)
        if timeline is not None and timeline >= self._newest:
            self._newest = timeline
            self._leave_others(host, timeline)

    def _leave_others(self, host: Host, timeline: int) -> None:
        """The server at `host` is the primary. End every session with a server that this primary has replaced, and
        every attempt to connect to another host.
        """
        replaced = [
            session
            for session, server in self._servers.items()
            # A session that began on a standby stays if this standby is the server that was promoted.
            if server.timeline < timeline and not (server.is_standby and server.host == host)
        ]
        # An opening whose timeout has expired may take a moment to end. It is left out here, because asyncio refuses to
        # reschedule an expired timeout.
        openings = [
            one for one in self._waiting if isinstance(one, _Opening) and one.host != host and not one.limit.expired()
        ]
        if replaced or openings:
            self._choose(host)
        if replaced:
            log.warning(
                "PostgreSQL: sessions with a replaced server were ended",
                primary=f"{host[0]}:{host[1]}", timeline=timeline, sessions=len(replaced),
            )  # fmt: skip
        for session in replaced:
            session.terminate()
            self._servers.pop(session, None)
        for opening in openings:
            opening.limit.reschedule(self.loop.time())


class WatchedConnection(_Connection):
    """A connection that registers each waiting statement with its watch. The class overrides every asyncpg method that
    this package uses to send statements; `tests/test_floors.py` checks this.

    If the connection is terminated during a statement, the statement raises an error of TRY_AGAIN.
    """

    #: The watch that ends this connection when its server was replaced. None: the connection is not watched.
    watch: FailoverWatch | None = None

    async def execute(self, query: str, *args: Any, **options: Any) -> str:
        return await self._carry_out(query, super().execute(query, *args, **options))

    async def executemany(self, command: str, *args: Any, **options: Any) -> None:
        await self._carry_out(command, super().executemany(command, *args, **options))

    async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._carry_out(query, super().fetch(query, *args, **options))

    async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._carry_out(query, super().fetchrow(query, *args, **options))

    async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
        return await self._carry_out(query, super().fetchval(query, *args, **options))

    async def _carry_out(self, _query: str, statement: Awaitable[_Answer]) -> _Answer:
        """Await the statement, whose text is `_query`. All methods above use this method."""
        if self.watch is not None:
            self.watch.begin(self)
        try:
            return await statement
        except AttributeError as error:
            # asyncpg sends a statement in several steps. If the watch, or the deadline of a request, terminates the
            # connection between two of them, asyncpg raises AttributeError.
            if self.is_closed():
                raise asyncpg.InterfaceError("the connection was terminated during a statement") from error
            raise
        finally:
            if self.watch is not None:
                self.watch.end(self)
