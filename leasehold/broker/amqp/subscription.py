"""One band of one queue, being consumed on a channel of its own, so that its troubles stay its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
from aiormq import spec
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage

from leasehold.broker.amqp.acks import Acks
from leasehold.broker.amqp.connection import CLOSE_SECONDS, Ladder, guarded, until_closed
from leasehold.broker.amqp.deliveries import Deliveries, Message
from leasehold.broker.amqp.topology import RPC_SECONDS, Topology
from leasehold.broker.amqp.wire import Wire

#: What a subscription does with a message: `receive(subscription, message, acks)`, called in the event loop.
Receive = Callable[["Subscription", Message, Acks], None]

log = structlog.get_logger(__name__)


class Subscription:
    """Declares, consumes, and begins again when its channel closes or the broker cancels its consumer.

    That covers a deleted queue, the broker's `consumer_timeout`, and a queue without a leader.
    """

    def __init__(self, topology: Topology, queue: str, band: int, prefetch: int) -> None:
        self._topology = topology
        self._prefetch = prefetch
        self._channel: AbstractChannel | None = None
        self._consumer_tag: str | None = None
        self._acks: Acks | None = None
        self._stopped = False
        self._has_consumed = False
        self._trouble: str | None = None
        self.queue = queue
        self.name = topology.name_of(queue, band)

    @property
    def consuming(self) -> bool:
        return self._consumer_tag is not None

    async def serve(
        self,
        connection: AbstractConnection,
        wire: Wire,
        receive: Receive,
        on_resumed: Callable[[Subscription], None],
    ) -> None:
        """Consume until cancelled; `on_resumed` is called each time that consuming begins again."""
        ladder = Ladder()
        while not self._stopped:
            ladder.begin()
            reason: Exception | None = None
            try:
                await self._consume(connection, wire, receive, on_resumed)
            # Whatever goes wrong with a subscription, the answer is the same: say it and try again.
            except Exception as error:  # noqa: BLE001
                reason = error
            if not connection.is_opened:
                return await until_closed(connection)  # the link tells why, and serves us the next one
            self._report(reason)
            await ladder.wait()
        return None

    async def stop(self) -> None:
        """No new deliveries; the channel stays, because ACKs go over the channel that delivered."""
        self._stopped = True
        channel, tag = self._channel, self._consumer_tag
        self._consumer_tag = None
        if channel is not None and tag is not None:
            with suppress(Exception):
                async with guarded(CLOSE_SECONDS):
                    await channel.basic_cancel(tag)

    async def drained(self) -> None:
        """Return when the ACKs given so far are on the wire, or can never be."""
        if self._acks is not None:
            await self._acks.drained()

    async def _consume(
        self,
        connection: AbstractConnection,
        wire: Wire,
        receive: Receive,
        on_resumed: Callable[[Subscription], None],
    ) -> None:
        await self._topology.declare(connection, self.name)
        async with guarded(RPC_SECONDS):
            channel: AbstractChannel = await connection.channel(publisher_confirms=False)
        acks = Acks(channel)
        sender = asyncio.create_task(acks.run())
        cancelled = asyncio.Event()
        channel.on_consumer_cancel_callbacks.add(partial(_note_cancel, cancelled))
        over = asyncio.create_task(cancelled.wait())
        self._channel, self._acks = channel, acks

        deliveries = Deliveries(lambda message: receive(self, message, acks))
        wire.sieve.take(channel.number, deliveries)
        try:
            async with guarded(RPC_SECONDS):
                await channel.basic_qos(prefetch_count=self._prefetch)
                consumer = await channel.basic_consume(self.name, _never)
            self._consumer_tag = consumer.consumer_tag
            if self._stopped:
                await self.stop()
            self._trouble = None
            if self._has_consumed:
                on_resumed(self)
            self._has_consumed = True
            await asyncio.wait({channel.closing, over, sender}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._consumer_tag = self._channel = self._acks = None
            await self._leave(channel, sender, over)
            wire.sieve.leave(channel.number, deliveries)

    async def _leave(self, channel: AbstractChannel, *tasks: asyncio.Task[object]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(Exception):
            async with guarded(CLOSE_SECONDS):
                await channel.close()

    def _report(self, error: Exception | None) -> None:
        """Once a trouble, not once an attempt: a queue may be out of order for hours."""
        trouble = f"{type(error).__name__}: {error}" if error else "consumer cancelled, or channel closed"
        if self._stopped or trouble == self._trouble:
            return
        self._trouble = trouble
        log.warning("queue is not consumed now; trying again until it is", queue=self.name, reason=trouble)


async def _never(_message: DeliveredMessage) -> None:
    """The client's own hand-over: deliveries are taken before."""
    raise AssertionError("a delivery reached the client")


def _note_cancel(cancelled: asyncio.Event, _frame: spec.Basic.Cancel) -> None:
    cancelled.set()
