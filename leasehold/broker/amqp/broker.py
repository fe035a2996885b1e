"""RabbitMQ as the broker. One connection publishes hints, and another connection consumes them. Each connection
reconnects by itself.

The connections are separate because RabbitMQ blocks connections that publish during a memory or disk alarm. Consuming
must go on during an alarm, because it empties the queues, and so ends the alarm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leasehold.broker.amqp.consumer import Consumer
from leasehold.broker.amqp.publisher import Publisher
from leasehold.broker.amqp.topology import Topology
from leasehold.broker.base import Delivery, Hint
from leasehold.settings import Settings


class AmqpBroker:
    """The Broker that publishes hints (messages that tell workers of due tasks) to RabbitMQ, and consumes them.
    base.Broker explains each method. The publisher and the consumer each have a `link`, which is a connection that
    reconnects whenever it breaks.
    """

    name = "amqp"
    delivers_hints = True

    def __init__(self, settings: Settings) -> None:
        self._topology = Topology(settings.amqp_queue_prefix, settings.amqp_queue_type)
        self._publisher = Publisher(settings, self._topology)
        self._consumer = Consumer(settings, self._topology)

    @property
    def publishing(self) -> bool:
        return self._publisher.ready

    @property
    def connected(self) -> bool:
        # `subscriptions`: queue -> whether the queue is consumed now.
        return self.publishing and all(self._consumer.subscriptions.values())

    @property
    def last_delivery_at(self) -> float | None:
        return self._consumer.last_delivery_at

    async def open(self) -> None:
        self._publisher.link.start()

    async def close(self) -> None:
        await asyncio.gather(self._consumer.close(), self._publisher.link.close())

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        return await self._publisher.publish(hints)

    async def consume(
        self,
        prefetch: Mapping[str, int],
        on_delivery: Callable[[Delivery], None],
        on_wake: Callable[[str], None] | None = None,
    ) -> None:
        """`prefetch`: queue -> how many unacknowledged hints RabbitMQ may deliver. `on_wake`: called with the name of a
        queue when the queue's consumer resumes after a gap, because hints may have been lost during the gap.
        """
        await self._consumer.consume(prefetch, on_delivery, on_wake)

    def consume_also(self, prefetch: Mapping[str, int]) -> None:
        self._consumer.consume_also(prefetch)

    async def stop_consuming(self) -> None:
        await self._consumer.stop()

    def rebuild_consumer(self) -> None:
        self._consumer.link.drop("its consumers get no hints")

    def describe(self) -> dict[str, Any]:
        connection = self._publisher.link.connection or self._consumer.link.connection
        server = connection.server_properties if connection is not None else None
        return {
            "broker": self.name,
            "connected": self.connected,
            "product": _text_of_property(server, "product"),
            "version": _text_of_property(server, "version"),
            "queue_type": self._topology.queue_type,
            "publishing": self.publishing,
            "consuming": dict(self._consumer.subscriptions),
            "unroutable": self._publisher.unroutable,  # how many hints RabbitMQ has returned
            "garbage": dict(self._consumer.garbage),  # reason -> how many messages were dropped
            "connects": {"publish": self._publisher.link.connects, "consume": self._consumer.link.connects},
        }


def _text_of_property(server: Any, name: str) -> str | None:
    value = server.get(name) if server else None
    return value.decode(errors="replace") if isinstance(value, bytes | bytearray) else value
