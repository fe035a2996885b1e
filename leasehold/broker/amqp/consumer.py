"""Consumes hints (messages that tell workers of due tasks) from RabbitMQ. It subscribes to the three bands (priorities)
of every queue, and passes each hint to `on_delivery`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import structlog
from aiormq.abc import AbstractConnection

from leasehold.broker.amqp.acks import Acks
from leasehold.broker.amqp.connection import Link
from leasehold.broker.amqp.deliveries import Message
from leasehold.broker.amqp.subscription import Subscription
from leasehold.broker.amqp.topology import Topology
from leasehold.broker.amqp.wire import Wire
from leasehold.broker.base import Delivery
from leasehold.broker.envelope import Garbage, decode
from leasehold.settings import Settings

#: The fraction of the prefetch that each band gets: `high`, `normal`, `low`. When every band has enough hints, workers
#: run them in this proportion. So `low` is slow under a flood of `high`, but never starves. No band can use the
#: fraction of another band. If all tasks of a worker are in one band, only the hints of that band can fill its slots (a
#: slot is room for one attempt). So a worker sets the prefetch to four times its slots. Then the fraction of `normal`
#: alone can fill the slots.
SHARES = (0.6, 0.3, 0.1)
#: The seconds for which `close` waits until the last ACKs are sent.
DRAIN_SECONDS = 3.0

log = structlog.get_logger(__name__)


def shares_of_bands(prefetch: int) -> tuple[int, ...]:
    """Each band's part of `prefetch`, rounded, and at least 1. So a prefetch of 1 becomes 3 in all, 1 for each band."""
    return tuple(max(1, round(prefetch * share)) for share in SHARES)


class Consumer:
    """One connection to RabbitMQ with a subscription for each queue and band."""

    def __init__(self, settings: Settings, topology: Topology) -> None:
        self._topology = topology
        self._subscriptions: list[Subscription] = []
        self._on_delivery: Callable[[Delivery], None] | None = None
        #: Called with the name of a queue whose hints may have been lost, so that the worker polls the queue.
        self._on_wake: Callable[[str], None] | None = None
        self.link = Link(settings, "consume", self._serve)
        #: A function that starts subscriptions on the open connection. None while there is no connection.
        self._start_serving: Callable[[Sequence[Subscription]], None] | None = None
        self.last_delivery_at: float | None = None  # `time.monotonic()` when the last message arrived
        self.garbage: Counter[str] = Counter()  # reason -> number of dropped messages

    @property
    def subscriptions(self) -> Mapping[str, bool]:
        """For each queue of the broker that this process wants to consume: its name, and whether it is being consumed
        now. After `stop` the result is empty.
        """
        return {
            subscription.name: subscription.consuming
            for subscription in self._subscriptions
            if not subscription.stopped
        }

    async def consume(
        self,
        prefetch: Mapping[str, int],
        on_delivery: Callable[[Delivery], None],
        on_wake: Callable[[str], None] | None,
    ) -> None:
        # `prefetch`: queue -> how many unacknowledged hints this process may hold.
        await self.close()  # a second call of `consume` replaces the first
        self._on_delivery, self._on_wake = on_delivery, on_wake
        self._subscriptions = self._new_subscriptions(prefetch)
        self.link.start()

    def consume_also(self, prefetch: Mapping[str, int]) -> None:
        new_subscriptions = self._new_subscriptions(prefetch)
        self._subscriptions += new_subscriptions
        if self._start_serving is not None:
            self._start_serving(new_subscriptions)

    def _new_subscriptions(self, prefetch: Mapping[str, int]) -> list[Subscription]:
        return [
            Subscription(self._topology, queue, band, share)
            for queue, total in prefetch.items()
            for band, share in enumerate(shares_of_bands(total))
        ]

    async def stop(self) -> None:
        await asyncio.gather(*(subscription.stop() for subscription in self._subscriptions))

    async def close(self) -> None:
        """Stop, send the last ACKs, and disconnect. RabbitMQ delivers unacknowledged hints again."""
        await self.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await asyncio.gather(*(subscription.drained() for subscription in self._subscriptions))
        await self.link.close()
        self._subscriptions = []

    async def _serve(self, connection: AbstractConnection, wire: Wire) -> None:
        # Serve all subscriptions, and those that `consume_also` adds, on this connection until cancelled.
        async with asyncio.TaskGroup() as group:

            def start_serving(subscriptions: Sequence[Subscription]) -> None:
                for subscription in subscriptions:
                    serving = subscription.serve(connection, wire, self._receive, self._wake_worker)
                    group.create_task(serving, name=subscription.name)

            self._start_serving = start_serving
            try:
                start_serving(self._subscriptions)
                await asyncio.Event().wait()  # until cancelled, because after `stop` the connection stays open for ACKs
            finally:
                self._start_serving = None

    def _wake_worker(self, subscription: Subscription) -> None:
        """Called when a subscription consumes again after a gap. Hints may have been lost in the gap, so the worker
        polls the queue.
        """
        if self._on_wake is not None:
            self._on_wake(subscription.queue)

    def _receive(self, subscription: Subscription, message: Message, acks: Acks) -> None:
        self.last_delivery_at = time.monotonic()
        tag = message.tag
        acks.delivered(tag)
        try:
            hint = decode(message.body, message.headers)
            if self._on_delivery is not None:
                self._on_delivery(Delivery(hint, partial(_ack, acks, tag), message.redelivered))
        # Acknowledge a message that cannot be decoded or handled. Otherwise RabbitMQ would deliver the message again
        # for ever, with the same error each time.
        except Exception as error:  # noqa: BLE001
            acks.settle(tag)
            self._drop(subscription, error, message.size)

    def _drop(self, subscription: Subscription, error: Exception, size: int) -> None:
        """Count each dropped message. Log only the first message of each kind, because a flood of garbage must not
        flood the log.
        """
        kind = error.kind if isinstance(error, Garbage) else "handler_error"
        self.garbage[kind] += 1
        if self.garbage[kind] == 1:
            log.warning(
                "message was dropped",
                kind=kind,
                queue=subscription.name,
                size_bytes=size,
                exc_info=_traceback_of(error),
            )


def _traceback_of(error: Exception) -> Exception | None:
    """The error, so that the log has its traceback. None for Garbage, whose traceback shows only the decoding."""
    return None if isinstance(error, Garbage) else error


async def _ack(acks: Acks, tag: int) -> None:
    acks.settle(tag)
