"""A connection to RabbitMQ that reconnects by itself (`Link`), and a safe way to wait for RabbitMQ (`answered_within`).

aio-pika's RobustConnection is not used. After a reconnect it restores every channel, and if one channel fails, it
reconnects again. So a single bad queue would keep all channels closed.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta

import aiormq
import structlog
from aio_pika.connection import make_url
from aiormq.abc import AbstractChannel, AbstractConnection

from leasehold.broker.amqp.watchdog import Patience, watch
from leasehold.broker.amqp.wire import Wire
from leasehold.domain.backoff import delay_after
from leasehold.domain.errors import BadSetting, BrokerUnavailable
from leasehold.runtime.foreign_errors import text_of
from leasehold.runtime.gather import cancel_and_wait, check_not_cancelled
from leasehold.settings import Settings
from leasehold.telemetry.outages import BROKER
from leasehold.urls import BrokerTls, BrokerUrl, broker_urls

log = structlog.get_logger(__name__)

#: Waits between attempts to open a connection, channel or consumer, with jitter. The first waits are short, for a brief
#: outage. The last waits are long, so that 500 workers that reconnect at once do not flood the broker.
RECONNECT_LADDER = tuple(timedelta(seconds=seconds) for seconds in (0.2, 0.5, 1, 2, 5))
#: The seconds that a node may take to accept a connection, and the seconds that a close may take.
CONNECT_SECONDS, CLOSE_SECONDS = 10.0, 3.0
#: After a connection, channel or consumer has worked for this long, the next wait is the shortest again.
SETTLED_SECONDS = 5.0


@asynccontextmanager
async def answered_within(seconds: float) -> AsyncIterator[None]:
    """A context manager for a block that waits for the broker. Raises TimeoutError after `seconds`, and
    BrokerUnavailable when the connection ends.

    `answered_within` corrects two faults of the AMQP client:
    - When the connection dies, the client ends a wait with a bare CancelledError, which no `except Exception` catches.
      `answered_within` raises BrokerUnavailable instead.
    - When the asyncio task that runs the block is cancelled, the client may lose the cancellation. `asyncio.wait_for`
      before Python 3.12 swallows a cancellation that comes with the broker's answer. A cancellation that comes while
      the connection breaks ends as an ordinary error. `answered_within` raises CancelledError in both cases.

    After `seconds`, `asyncio.timeout` also cancels the asyncio task. When the block has ended, it undoes this
    cancellation, and raises TimeoutError in place of the CancelledError.
    """
    task = asyncio.current_task()
    assert task is not None
    cancellations_before = task.cancelling()
    async with asyncio.timeout(seconds):
        try:
            yield
        except asyncio.CancelledError as cancelled:
            if task.cancelling() > cancellations_before:
                raise
            raise BrokerUnavailable("the connection closed") from cancelled
        except Exception as error:
            if task.cancelling() > cancellations_before:
                raise asyncio.CancelledError from error
            raise
    # The block has ended without an error, so its own timeout has not cancelled this task. If `cancelling` has risen
    # meanwhile, other code has cancelled this task, and the client has lost the cancellation.
    if task.cancelling() > cancellations_before:
        raise asyncio.CancelledError


async def until_one_ends(*awaitables: Awaitable[object]) -> None:
    """Run the awaitables until one of them ends, and cancel the others. If the one that ended raised an error, raises
    this error.
    """
    tasks = {asyncio.ensure_future(awaitable) for awaitable in awaitables}
    try:
        ended_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*tasks)
    for task in ended_tasks:
        if not task.cancelled() and (error := task.exception()):
            raise error


async def until_closed(resource: AbstractConnection | AbstractChannel) -> None:
    """Return when `resource` is closed, for any reason."""
    await asyncio.wait({resource.closing})


async def close(resource: AbstractConnection | AbstractChannel) -> None:
    """Close `resource` with AMQP's handshake, for at most CLOSE_SECONDS. After that time the close is cancelled,
    because it may wait for a request that RabbitMQ never answers. When the close of a connection is cancelled, the
    client drops the socket.
    """
    with suppress(Exception):
        async with answered_within(CLOSE_SECONDS):
            await resource.close()


def _reason(connection: AbstractConnection) -> str:
    closing_future = connection.closing
    error = closing_future.exception() if closing_future.done() and not closing_future.cancelled() else None
    return "without an error" if error is None else text_of(error)


class Ladder:
    """The growing waits between the attempts of one loop. The waits become short again only after an attempt has opened
    a connection, channel or consumer that worked for SETTLED_SECONDS.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._opened_at: float | None = None

    @property
    def failures(self) -> int:
        """How many attempts in a row have failed."""
        return self._failures

    def record_opened(self) -> None:
        """Record that the attempt has opened its connection, channel or consumer."""
        self._opened_at = time.monotonic()

    async def wait(self) -> None:
        if self._opened_at is not None and time.monotonic() - self._opened_at > SETTLED_SECONDS:
            self._failures = 0
        self._opened_at = None
        self._failures += 1
        await asyncio.sleep(delay_after(self._failures, RECONNECT_LADDER).total_seconds())


class Nodes:
    """The nodes of the cluster, and the node that a connection tries next. The order is random, so that the processes
    of an installation spread over the nodes.
    """

    def __init__(self, settings: Settings) -> None:
        self._setting = settings.amqp_url
        self._setting_text = ""  # the text of the setting when it was last read
        self._order: list[BrokerUrl] = []
        self._read_nodes()
        self._host_seconds = settings.amqp_host_timeout
        self._failed = 0  # the number of nodes in a row that did not accept a connection
        self._has_accepted = False  # whether the current node accepted a connection

    @property
    def current(self) -> BrokerUrl:
        return self._order[0]

    @property
    def connect_seconds(self) -> float:
        """The seconds in which the current node must accept a connection. The time is short at first. It doubles after
        each round in which all nodes failed, up to CONNECT_SECONDS. A single node gets all of CONNECT_SECONDS, because
        there is no other node to try.
        """
        if len(self._order) == 1:
            return CONNECT_SECONDS
        rounds = min(self._failed // len(self._order), 10)  # rounds in which all nodes failed
        return min(CONNECT_SECONDS, self._host_seconds * float(2**rounds))

    def record_accepted(self) -> None:
        """Record that the current node has accepted a connection."""
        self._failed = 0
        self._has_accepted = True

    def advance(self) -> None:
        """Make the next node the current node. Call this when the current node failed, or when its connection ended."""
        self._read_nodes()
        self._order.append(self._order.pop(0))
        self._failed = 0 if self._has_accepted else self._failed + 1
        self._has_accepted = False

    @property
    def is_current_untried(self) -> bool:
        """Whether a round over the nodes has begun, and the current node was not tried in this round yet. Then the link
        tries this node without a wait. A new round begins when all nodes have failed, and when a connection that was
        accepted has ended.
        """
        return self._failed % len(self._order) != 0

    def _read_nodes(self) -> None:
        """Read the setting again, because its file may now have another password or other nodes. If the new text is not
        a valid URL, keep the nodes of the last text. Raises BadSetting if there is no earlier text.
        """
        text = self._setting.get_secret_value()
        if text == self._setting_text:
            return
        self._setting_text = text
        try:
            nodes = broker_urls(text)
        except BadSetting:
            if not self._order:
                raise
            log.warning("the new LEASEHOLD_AMQP_URL is not used: it is not a URL of RabbitMQ")
            return
        self._order = random.sample(nodes, len(nodes))


class Link:
    """Connects, runs `serve` with the connection, and starts over when the connection or `serve` ends.

    `serve` also gets the connection's `Wire`, which gives a consumer or publisher the frames of its channel. When the
    connection is lost, the link cancels `serve`. `role`: the link's name. It is a part of the connection's name at
    RabbitMQ, and the log shows it when RabbitMQ is unreachable.
    """

    def __init__(
        self,
        settings: Settings,
        role: str,
        serve: Callable[[AbstractConnection, Wire], Awaitable[None]],
    ) -> None:
        self._nodes = Nodes(settings)
        self._role = role
        self._heartbeat = settings.amqp_heartbeat
        # How long RabbitMQ may be silent before `watch` ends the connection.
        self._patience = Patience(settings.amqp_silence_seconds)
        self._serve = serve
        self._running: asyncio.Task[None] | None = None
        self._drop_requested = asyncio.Event()
        self._drop_reason = ""
        self._tls_fault: str | None = None  # why the TLS files could not be used at the last attempt to connect
        self.connection: AbstractConnection | None = None
        self.connects = 0  # how many connections were opened

    def start(self) -> None:
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=f"broker-{self._role}")

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
            self._running = None

    def drop(self, reason: str) -> None:
        """Replace this connection with a new one. `reason`: for the log."""
        self._drop_reason = reason
        self._drop_requested.set()

    async def _run(self) -> None:
        ladder = Ladder()
        while True:
            try:
                await self._connect_and_serve(ladder)
            # Every error of a connection has the same remedy: record it, and reconnect.
            except Exception as error:  # noqa: BLE001
                check_not_cancelled()
                BROKER.record_error(error, self._role, detail=str(error))
            self._nodes.advance()
            # Try each other node immediately. Wait only before a new round over the nodes.
            if not self._nodes.is_current_untried:
                await ladder.wait()

    async def _connect_and_serve(self, ladder: Ladder) -> None:
        name = f"leasehold {self._role} {socket.gethostname()} {os.getpid()}"
        broker = self._nodes.current
        url = make_url(broker.url, heartbeat=self._heartbeat)
        tls = None if broker.tls is None else await self._renewed(broker.tls)
        wire = Wire()  # gets the bytes of the connection before the AMQP client does
        # aio-pika's Connection is not used, because it leaks a socket if it is cancelled just after opening the socket.
        connection = aiormq.Connection(
            url, context=tls, client_properties={"connection_name": name}, transport_factory=wire
        )
        try:
            async with answered_within(self._nodes.connect_seconds):
                await connection.connect()
            self._nodes.record_accepted()
            ladder.record_opened()
            self.connection = connection
            self.connects += 1
            BROKER.record_answer()
            await self._serve_until_lost(connection, wire)
        finally:
            self.connection = None
            await close(connection)

    async def _renewed(self, tls: BrokerTls) -> ssl.SSLContext:
        """The TLS context, made of the files as they are now. If these files cannot be used, the previous context is
        returned. Logs an error only if it differs from the last error, because there may be many attempts to connect.
        """
        fault: str | None = None
        try:
            await asyncio.to_thread(tls.read_again)
        except BadSetting as error:
            fault = str(error)
            if fault != self._tls_fault:
                log.warning("the TLS files for RabbitMQ cannot be used; those read before are used", reason=fault)
        self._tls_fault = fault
        return tls.context

    async def _serve_until_lost(self, connection: AbstractConnection, wire: Wire) -> None:
        # This method always ends with an error, which `_run` records.
        self._drop_requested.clear()
        await until_one_ends(
            self._serve(connection, wire),
            until_closed(connection),
            self._drop_requested.wait(),
            watch(connection, wire, self._patience),
        )
        if self._drop_requested.is_set():
            raise BrokerUnavailable(self._drop_reason)
        raise BrokerUnavailable(f"the connection closed: {_reason(connection)}")
