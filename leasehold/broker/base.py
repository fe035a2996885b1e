"""What a broker is to us: a way to say "task T may be runnable" quickly. Nothing true lives in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

#: Priority bands, most urgent first; a task row holds the index.
BANDS = ("high", "normal", "low")


@dataclass(frozen=True, slots=True)
class Hint:
    """Task `task_id` may be runnable. May be lost, doubled, late or reordered without harm.

    `tenant`: whose task it is, so that a worker can keep a share of its slots for other tenants without asking the
    database. Empty: the hint's sender did not know; such hints count as one tenant's.
    """

    task_id: UUID
    queue: str
    band: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A hint as it arrived. `ack` never raises: an ACK that cannot be sent leads to a harmless redelivery.

    Acking twice, or after a reconnect, does nothing. `ack` returns before the ACK is on the wire; `close`
    of the broker sends what was acked before it.
    """

    hint: Hint
    ack: Callable[[], Awaitable[None]]
    redelivered: bool = False


class Broker(Protocol):
    """Reconnects by itself for as long as it is open. No method raises because a server is away."""

    name: str

    @property
    def connected(self) -> bool:
        """The fast path works: hints can be sent and, when consuming, arrive from every queue."""

    @property
    def last_delivery_at(self) -> float | None:
        """`time.monotonic()` of the last thing that arrived from the broker; None before the first."""

    async def open(self) -> None:
        """Begin to connect in the background; does not wait and does not raise when the broker is down."""

    async def close(self) -> None:
        """Send the ACKs that wait, then disconnect. What was not acked goes back to the broker."""

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        """Send them pipelined; True where the broker confirmed.

        False means not sent, or unknown: the relay sends such a hint again. At once all False when
        disconnected. Raises nothing but the cancellation of the caller's own task.
        """

    async def consume(
        self,
        prefetch: Mapping[str, int],
        on_delivery: Callable[[Delivery], None],
        on_wake: Callable[[str], None] | None = None,
    ) -> None:
        """Start (and after every reconnect restart) consuming; returns at once. A second call replaces the first.

        `prefetch`: the queues, and of each the most hints that this process holds unacknowledged, all bands
        together. The bands share it 60/30/10 and do not lend (see consumer.SHARES), so ask for about three
        times what shall be worked on at once.
        `on_delivery` is called in the event loop and must only hand the hint over.
        `on_wake(queue)`: there may be work that no delivery tells of (the broker carries no hints, or
        was away and may have lost some), so look into the database now. It must only hand over, too.
        """

    def consume_also(self, prefetch: Mapping[str, int]) -> None:
        """Consume these queues beside those that `consume` was told of; what comes is handed to the same."""

    async def stop_consuming(self) -> None:
        """Stop new deliveries; unacknowledged ones stay ours until acked or the connection closes."""

    def rebuild_consumer(self) -> None:
        """Drop the consumer's connection and make a new one: for a watchdog that sees work but no hints."""

    def describe(self) -> dict[str, Any]:
        """Tell what is at the other end and how it goes, for the start-up self-check; never a secret."""
