"""The interface of a broker. A broker carries hints (messages that a task may be runnable) to workers. Only the task's
row in PostgreSQL shows whether the task is really runnable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

#: Priority bands, the most urgent first. The row of a task stores the index of the task's band.
BANDS = ("high", "normal", "low")


@dataclass(frozen=True, slots=True)
class Hint:
    """A message that task `task_id` may be runnable. Hints may be lost, doubled, late or reordered without harm.

    `tenant`: the task's tenant. Because the hint names the tenant, a worker needs no query to keep a part of its slots
    for other tenants. (A slot is room for one attempt.) If `tenant` is empty, the hint came without a tenant, and
    workers count all such hints as the hints of one tenant. `headers`: for example the trace context of the publisher.
    """

    task_id: UUID
    queue: str
    band: int = 1  # the index in BANDS
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A hint that arrived. `ack` never raises. If the ACK cannot be sent, the broker delivers the hint again, which
    does no harm.

    A second `ack`, or an `ack` after a reconnect, does nothing. `ack` returns before the ACK is sent. The broker's
    `close` sends the ACKs that still wait.
    """

    hint: Hint
    ack: Callable[[], Awaitable[None]]
    redelivered: bool = False


class Broker(Protocol):
    """The connection of one process to the broker. It reconnects by itself for as long as it is open. If a server is
    unreachable, the methods raise no error.
    """

    #: The broker's name for people: in logs, metrics and the answer about the process's health.
    name: str
    #: Whether hints arrive one by one, each with its task. False: the broker only calls `on_wake` with the name of a
    #: queue that may have due tasks.
    delivers_hints: bool

    @property
    def publishing(self) -> bool:
        """Whether hints can be sent."""

    @property
    def connected(self) -> bool:
        """Whether hints can be sent and, if this process consumes, can arrive from every queue."""

    @property
    def last_delivery_at(self) -> float | None:
        """`time.monotonic()` when the last message arrived; None before the first."""

    async def open(self) -> None:
        """Begin to connect in the background. Returns immediately, and does not raise when the broker is down."""

    async def close(self) -> None:
        """Send the ACKs that wait, then disconnect. The broker delivers unacknowledged hints again."""

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        """Send the hints without waiting between them. Returns for each hint whether the broker confirmed it.

        False: the hint was not sent, or nobody knows whether it was. The relay (a loop of each worker) sends such a
        hint again. Without a connection, the call returns False for every hint, and returns immediately. Raises only
        CancelledError, when the caller's asyncio task is cancelled.
        """

    async def consume(
        self,
        prefetch: Mapping[str, int],
        on_delivery: Callable[[Delivery], None],
        on_wake: Callable[[str], None] | None = None,
    ) -> None:
        """Start consuming, and start again after every reconnect; returns immediately. A second call replaces the
        first.

        `prefetch`: for each queue, how many unacknowledged hints this process may hold, all bands together. The bands
        get 60, 30 and 10 percent of this number (SHARES in amqp/consumer.py), and no band can use the part of another
        band. So a worker passes four times the number of its slots. Then the 30 percent of `normal` alone can fill the
        slots.
        `on_delivery`: called in the event loop, so it must only pass the hint on.
        `on_wake(queue)`: called when the queue may have tasks without a hint, because the broker carries no hints, or
        because it was unreachable and may have lost some. The worker then polls the queue. It is called in the event
        loop, so it must only pass the name on.
        """

    def consume_also(self, prefetch: Mapping[str, int]) -> None:
        """Consume these queues, too, with the callbacks that `consume` got."""

    async def stop_consuming(self) -> None:
        """Stop new deliveries. This process keeps its unacknowledged hints until it acks them or the connection
        closes.
        """

    def rebuild_consumer(self) -> None:
        """Replace the consumer's connection. A watchdog calls this when tasks are due but no hint arrives."""

    def describe(self) -> dict[str, Any]:
        """The broker's product, version and state, for the self-check at the start and for metrics; never a secret."""
