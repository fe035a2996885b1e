"""What a broker is to us: a way to say "task T may be runnable" quickly. Nothing true lives in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from uuid import UUID

#: Priority bands, most urgent first; a task row holds the index.
BANDS = ("high", "normal", "low")


@dataclass(frozen=True, slots=True)
class Hint:
    """Task `task_id` may be runnable. May be lost, doubled, late or reordered without harm."""

    task_id: UUID
    queue: str
    band: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A hint as it arrived. `ack` never raises: an ACK that cannot be sent leads to a harmless redelivery."""

    hint: Hint
    ack: Callable[[], Awaitable[None]]
    redelivered: bool = False


class Broker(Protocol):
    """Reconnects by itself for as long as it is open."""

    name: str

    @property
    def connected(self) -> bool: ...

    async def open(self) -> None:
        """Begin to connect in the background; does not wait and does not raise when the broker is down."""

    async def close(self) -> None: ...

    async def publish(self, hints: Sequence[Hint]) -> list[bool]:
        """Pipelined; True where the broker confirmed. False (not sent, or unknown) is sent again by the relay."""

    async def consume(
        self, queues: Sequence[str], prefetch: int, on_delivery: Callable[[Delivery], None]
    ) -> None:
        """Start (and after every reconnect restart) consuming. `on_delivery` must only hand the hint over."""

    async def stop_consuming(self) -> None:
        """Stop new deliveries; unacknowledged ones stay ours until acked or the connection closes."""
