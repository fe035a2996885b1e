"""A subscription consumes one band (high, normal or low priority) of one queue. It has a separate channel, so that an
error on the channel stops no other subscription.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog
from aiormq import spec
from aiormq.abc import AbstractChannel, AbstractConnection, DeliveredMessage

from leasehold.broker.amqp.acks import Acks
from leasehold.broker.amqp.connection import CLOSE_SECONDS, Ladder, answered_within, close, until_closed
from leasehold.broker.amqp.deliveries import Deliveries, Message
from leasehold.broker.amqp.topology import RPC_SECONDS, Topology
from leasehold.broker.amqp.wire import Wire
from leasehold.runtime.gather import cancel_and_wait, check_not_cancelled

#: A function that a subscription calls in the event loop, with each message and with the Acks that acknowledge the
#: message.
Receive = Callable[["Subscription", Message, Acks], None]

#: If a quorum queue gets a new leader while a request waits for an answer, the answer may never come. So each of the
#: first _FIRST_ATTEMPTS attempts to consume waits only for _FIRST_SECONDS. Later attempts wait for RPC_SECONDS, because
#: the broker may be slow.
_FIRST_SECONDS, _FIRST_ATTEMPTS = 3.0, 3

log = structlog.get_logger(__name__)


class Subscription:
    """Declares the queue, consumes it, and starts again when its channel closes or RabbitMQ cancels the consumer.
    RabbitMQ cancels a consumer when the queue was deleted, when its `consumer_timeout` has passed, or when the queue
    has no leader.
    """

    def __init__(self, topology: Topology, queue: str, band: int, prefetch: int) -> None:
        self._topology = topology
        self._prefetch = prefetch
        self._channel: AbstractChannel | None = None
        self._consumer_tag: str | None = None
        self._acks: Acks | None = None
        self.stopped = False  # `stop` was called: nothing consumes the queue, on purpose
        self._has_consumed = False
        self._last_reason: str | None = None  # why the last attempt failed; None: the last attempt succeeded
        self.queue = queue
        self.name = topology.name_of(queue, band)  # RabbitMQ's queue for this band of `queue`

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
        """Consume until cancelled. `on_resumed`: called each time that consuming starts, except the first time."""
        ladder = Ladder()  # the growing waits between the attempts to consume
        while not self.stopped:
            reason: Exception | None = None
            try:
                await self._consume(connection, wire, receive, on_resumed, ladder)
            # Every error of a subscription has the same remedy: log it, and try again.
            except Exception as error:  # noqa: BLE001
                check_not_cancelled()  # the AMQP client may have turned the task's cancel into another error
                reason = error
            if not connection.is_opened:
                # The caller logs why the connection closed, and calls `serve` with the next connection.
                return await until_closed(connection)
            self._report(reason)
            await ladder.wait()
        return None

    async def stop(self) -> None:
        """Stop new deliveries. The channel stays open, because an ACK must use the channel of its delivery."""
        self.stopped = True
        channel, tag = self._channel, self._consumer_tag
        self._consumer_tag = None
        if channel is not None and tag is not None:
            with suppress(Exception):
                async with answered_within(CLOSE_SECONDS):
                    await channel.basic_cancel(tag)

    async def drained(self) -> None:
        """Return when all ACKs up to now are on the wire, or the channel is lost."""
        if self._acks is not None:
            await self._acks.drained()

    async def _consume(
        self,
        connection: AbstractConnection,
        wire: Wire,
        receive: Receive,
        on_resumed: Callable[[Subscription], None],
        ladder: Ladder,
    ) -> None:
        # Declare the queue, open a channel, and begin to consume. When the channel closes, RabbitMQ cancels the
        # consumer, or ACKs cannot be sent, close the channel.
        await self._topology.declare(connection, self.name)
        async with answered_within(RPC_SECONDS):
            channel: AbstractChannel = await connection.channel(publisher_confirms=False)
        acks = Acks(channel)
        ack_task = asyncio.create_task(acks.run())
        cancel_event = asyncio.Event()
        channel.on_consumer_cancel_callbacks.add(partial(_note_cancel, cancel_event))
        cancel_task = asyncio.create_task(cancel_event.wait())
        self._channel, self._acks = channel, acks

        # `wire.sieve` gets each frame from the broker before the AMQP client does. It passes this channel's deliveries
        # to `receive`, and all other frames to the client.
        deliveries = Deliveries(lambda message: receive(self, message, acks))
        wire.sieve.attach(channel.number, deliveries)
        try:
            async with answered_within(_FIRST_SECONDS if ladder.failures < _FIRST_ATTEMPTS else RPC_SECONDS):
                await channel.basic_qos(prefetch_count=self._prefetch)
                consumer = await channel.basic_consume(self.name, _refuse)
            self._consumer_tag = consumer.consumer_tag
            ladder.record_opened()
            if self.stopped:  # `stop` was called before the consumer had a tag
                await self.stop()
            self._last_reason = None
            if self._has_consumed:
                on_resumed(self)
            self._has_consumed = True
            await asyncio.wait({channel.closing, cancel_task, ack_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._consumer_tag = self._channel = self._acks = None
            await cancel_and_wait(ack_task, cancel_task)
            await close(channel)
            wire.sieve.detach(channel.number, deliveries)

    def _report(self, error: Exception | None) -> None:
        """Log an error only if it differs from the last error, because a queue may be broken for hours."""
        reason = f"{type(error).__name__}: {error}" if error else "consumer cancelled, or channel closed"
        if self.stopped or reason == self._last_reason:
            return
        self._last_reason = reason
        log.warning("the queue is not consumed; trying again until it is", queue=self.name, reason=reason)


async def _refuse(_message: DeliveredMessage) -> None:
    """The AMQP client's callback. It is never called, because `Deliveries` takes each delivery first."""
    raise AssertionError("a delivery reached the client")


def _note_cancel(cancel_event: asyncio.Event, _frame: spec.Basic.Cancel) -> None:
    cancel_event.set()
