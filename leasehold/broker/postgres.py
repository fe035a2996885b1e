"""The broker of an installation without RabbitMQ. Workers poll PostgreSQL at intervals, and a NOTIFY makes them poll
immediately.

Transactions with a NOTIFY commit one after another, because each takes a database-wide lock at its commit. So no
transaction with other work uses NOTIFY. A separate connection sends the names of queues that have new tasks, at a low
rate. If a notification is lost, the workers still find all tasks by their polls, but later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import asyncpg
from asyncpg.pool import PoolConnectionProxy
from pydantic import SecretStr

from leasehold.broker.amqp.connection import Ladder, until_one_ends
from leasehold.broker.base import Delivery, Hint
from leasehold.db.servers import open_connection
from leasehold.runtime.gather import check_not_cancelled
from leasehold.settings import Settings
from leasehold.telemetry.outages import DATABASE
from leasehold.urls import database_url

#: The channel of NOTIFY and LISTEN.
CHANNEL = "leasehold_hints"
#: Seconds between two rounds of notifications that a process sends. Each round names all queues that got hints since
#: the previous round.
NOTIFY_INTERVAL_SECONDS = 0.005
#: How long it may take to open a connection, or to run a statement on it, in seconds.
CONNECT_SECONDS = 10.0
#: Seconds between two probes of the listening connection. Without probes, nobody would notice a server that died,
#: because it does not close its connections.
PROBE_SECONDS = 10.0
#: How long it may take to close a connection, and how long `PostgresBroker.close` waits for the last notification.
CLOSE_SECONDS = 3.0

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


class PostgresBroker:
    """A Broker that delivers no hints (messages that name a due task). It only calls `on_wake`, so that the worker
    polls the queue.
    """

    name = "postgres"
    delivers_hints = False

    def __init__(self, settings: Settings) -> None:
        # `direct()`: the settings with the URL of PostgreSQL itself. NOTIFY and LISTEN each need a PostgreSQL session
        # of their own, which a pooler may not give.
        self._notifier = _Session(settings.direct().database_url, "notify", self._notify)
        self._listener = _Session(settings.direct().database_url, "listen", self._listen)
        self._pending_queues: dict[str, None] = {}  # queue names, in the order of their first hint
        self._has_pending = asyncio.Event()
        self._all_notified = asyncio.Event()  # no queue is pending
        self._all_notified.set()
        self._queues: tuple[str, ...] = ()
        self._on_wake: Callable[[str], None] | None = None
        self.last_delivery_at: float | None = None

    @property
    def publishing(self) -> bool:
        return self._notifier.ready

    @property
    def connected(self) -> bool:
        return self.publishing and (not self._queues or self._listener.ready)

    async def open(self) -> None:
        self._notifier.start()

    async def close(self) -> None:
        await self.stop_consuming()
        if self._notifier.ready:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._all_notified.wait()
        await self._notifier.close()

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        """Remember the queues of the hints, and return immediately. Each hint counts as confirmed, because even without
        the hint a poll finds the task.
        """
        for hint in hints:
            self._pending_queues[hint.queue] = None
        if hints:
            self._all_notified.clear()
            self._has_pending.set()
        return [True] * len(hints)

    async def consume(
        self,
        prefetch: Mapping[str, int],
        on_delivery: Callable[[Delivery], None],  # noqa: ARG002 - Broker's parameter; this broker has no deliveries
        on_wake: Callable[[str], None] | None = None,
    ) -> None:
        """Begin to listen. `prefetch` has the names of the queues as its keys. Call `on_wake` for each of these queues
        after each connect, and for one of them when a notification names it.
        """
        await self.stop_consuming()
        self._queues, self._on_wake = tuple(prefetch), on_wake
        self._listener.start()

    def consume_also(self, prefetch: Mapping[str, int]) -> None:
        self._queues += tuple(prefetch)
        self._wake(prefetch)

    async def stop_consuming(self) -> None:
        await self._listener.close()
        self._queues, self._on_wake = (), None

    def rebuild_consumer(self) -> None:
        self._listener.drop()

    def describe(self) -> dict[str, Any]:
        return {
            "broker": self.name,
            "connected": self.connected,
            "product": "PostgreSQL",
            "version": self._notifier.server_version or self._listener.server_version,
            "queue_type": "table",
            "publishing": self.publishing,
            "consuming": dict.fromkeys(self._queues, self._listener.ready),
            "connects": {"publish": self._notifier.connects, "consume": self._listener.connects},
        }

    async def _notify(self, connection: Connection) -> None:
        """Send the names of the pending queues, pause, and repeat. If the connection fails, the names stay pending, and
        the next connection sends them.
        """
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            queues, self._pending_queues = self._pending_queues, {}
            try:
                await connection.execute(
                    "SELECT pg_notify($1, queue) FROM unnest($2::text[]) AS queue",
                    CHANNEL,
                    list(queues),
                    timeout=CONNECT_SECONDS,
                )
            except BaseException:
                self._pending_queues = queues | self._pending_queues
                self._has_pending.set()
                raise
            if not self._pending_queues:
                self._all_notified.set()
            await asyncio.sleep(NOTIFY_INTERVAL_SECONDS)

    async def _listen(self, connection: Connection) -> None:
        await connection.add_listener(CHANNEL, self._on_notification)
        self._wake(self._queues)  # notifications may have come before this connection listened
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await connection.execute("SELECT 1", timeout=CONNECT_SECONDS)

    def _on_notification(
        self,
        _connection: Connection | PoolConnectionProxy[asyncpg.Record],
        _pid: int,
        _channel: str,
        payload: object,
    ) -> None:
        self.last_delivery_at = time.monotonic()
        self._wake(name for name in self._queues if name == payload)

    def _wake(self, queues: Iterable[str]) -> None:
        if self._on_wake is not None:
            for queue in queues:
                self._on_wake(queue)


class _Session:
    """A connection outside the pools, which is opened again whenever it breaks. While the connection is open, `serve`
    runs with it. `role` (notify or listen) names the connection in PostgreSQL and in the log. No transaction is ever
    opened on the connection.
    """

    def __init__(self, url: SecretStr, role: str, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self._url = url
        self._role = role
        self._serve = serve
        self._task: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self.ready = False
        self.connects = 0  # how many connections were opened
        self.server_version: str | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"hints-{self._role}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def drop(self) -> None:
        self._lost.set()

    async def _run(self) -> None:
        ladder = Ladder()  # the growing waits between connections
        while True:
            try:
                await self._connect_and_serve(ladder)
            # Every error of a connection has the same remedy: record it, and reconnect.
            except Exception as error:  # noqa: BLE001
                check_not_cancelled()
                DATABASE.record_error(error, f"hints: {self._role}")
            await ladder.wait()

    async def _connect_and_serve(self, ladder: Ladder) -> None:
        connection = await open_connection(
            database_url(self._url.get_secret_value()),
            timeout=CONNECT_SECONDS,
            host_timeout=CONNECT_SECONDS / 4,
            server_settings={"application_name": f"leasehold {self._role}"},
            # Cache no prepared statements, because a pooler may lose them. A cache would save little, because each
            # session repeats only one statement.
            statement_cache_size=0,
        )
        try:
            self._lost.clear()
            connection.add_termination_listener(lambda _: self._lost.set())
            self.server_version = ".".join(str(part) for part in connection.get_server_version()[:2])
            self.ready = True
            ladder.record_opened()
            DATABASE.record_answer()
            self.connects += 1
            await until_one_ends(self._serve(connection), self._lost.wait())
        finally:
            self.ready = False
            with suppress(Exception):
                await connection.close(timeout=CLOSE_SECONDS)
