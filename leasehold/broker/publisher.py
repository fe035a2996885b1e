"""The publishing half: persistent, mandatory, confirmed, pipelined; every doubt is an honest False."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import structlog
from aiormq import spec
from aiormq.abc import AbstractChannel, AbstractConnection
from aiormq.exceptions import PublishError

from leasehold.broker.base import Hint
from leasehold.broker.connection import Ladder, Link, guarded, until_closed
from leasehold.broker.envelope import encode
from leasehold.broker.topology import RPC_SECONDS, Topology
from leasehold.broker.wire import Deliveries
from leasehold.errors import BrokerUnavailable
from leasehold.settings import Settings

#: Publishes in flight at once: enough to hide the broker's fsync, few enough to bound memory.
WINDOW = 500
PERSISTENT = 2

log = structlog.get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Session:
    """One open channel: what was declared over it and what is being sent on it."""

    connection: AbstractConnection
    channel: AbstractChannel
    declared: set[str] = field(default_factory=set)
    sending: set[asyncio.Task[None]] = field(default_factory=set)

    def abandon(self) -> None:
        """End what is being sent: no confirm will come, so nobody shall wait for one until the timeout."""
        for task in self.sending:
            task.cancel()


class Publisher:
    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._timeout = settings.amqp_publish_timeout
        self._topology = topology
        self._session: _Session | None = None
        self.link = Link(settings.amqp_url, "publish", settings.amqp_heartbeat, self._serve)
        self.unroutable = 0

    @property
    def ready(self) -> bool:
        return self._session is not None

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        """Return True where the broker confirmed; raises nothing but our own cancellation."""
        sent: list[bool] = []
        for start in range(0, len(hints), WINDOW):
            sent += await self._publish_window(hints[start : start + WINDOW])
        return sent

    async def _publish_window(self, hints: Sequence[Hint]) -> list[bool]:
        session = self._session
        if session is None:
            return [False] * len(hints)
        names = [self._topology.name_of(hint.queue, hint.band) for hint in hints]
        try:
            # Under an alarm the broker stops reading from publishers: sending would only pile up copies.
            async with guarded(self._timeout):
                await session.connection.ready()
        except Exception:  # noqa: BLE001 - a doubt is a False
            return [False] * len(hints)
        await self._declare_missing(session, set(names) - session.declared)
        tasks = [asyncio.create_task(self._send(session, name, hint)) for name, hint in zip(names, hints, strict=True)]
        session.sending.update(tasks)
        if session is not self._session:
            session.abandon()
        try:
            # A child that a dying connection cancelled is a result here; only our own cancellation raises.
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            session.sending.difference_update(tasks)
        return [outcome is None for outcome in outcomes]

    async def _send(self, session: _Session, name: str, hint: Hint) -> None:
        """Return once confirmed; raise for everything else.

        Straight to the AMQP layer: aio-pika's Exchange.publish costs half as much again.
        """
        if name not in session.declared:
            raise BrokerUnavailable("the queue is not declared")
        properties = spec.Basic.Properties(
            delivery_mode=PERSISTENT, content_type="application/json", headers=dict(hint.headers) or None
        )
        try:
            await session.channel.basic_publish(
                encode(hint),
                routing_key=name,
                properties=properties,
                mandatory=True,
                timeout=self._timeout,
            )
        except PublishError:
            self._returned(session, name)
            raise

    def _returned(self, session: _Session, name: str) -> None:
        """Count it. The queue is gone (deleted, or a fresh broker), so the next batch declares it again."""
        self.unroutable += 1
        if name in session.declared:
            session.declared.discard(name)
            log.warning("hint was unroutable; the queue will be declared again", queue=name)

    async def _declare_missing(self, session: _Session, names: set[str]) -> None:
        await asyncio.gather(*(self._declare(session, name) for name in sorted(names)))

    async def _declare(self, session: _Session, name: str) -> None:
        try:
            await self._topology.declare(session.connection, name)
        except Exception as error:  # noqa: BLE001 - this name's hints stay unsent; the others go on
            log.warning("queue cannot be declared", queue=name, reason=type(error).__name__, detail=str(error))
        else:
            session.declared.add(name)

    async def _serve(self, connection: AbstractConnection, _deliveries: Deliveries) -> None:
        ladder = Ladder()
        while True:
            ladder.begin()
            async with guarded(RPC_SECONDS):
                channel: AbstractChannel = await connection.channel(publisher_confirms=True, on_return_raises=True)
            session = self._session = _Session(connection, channel)
            try:
                await until_closed(channel)
            finally:
                self._session = None
                session.abandon()
            if not connection.is_opened:
                return await until_closed(connection)  # the link tells why, and serves us the next one
            log.warning("publishing channel was closed; opening another")
            await ladder.wait()
