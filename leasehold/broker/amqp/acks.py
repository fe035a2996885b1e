"""Sends the acknowledgements of one channel, many in one write. There is no timer. The ACKs that come during a write go
out together in the next write.

Source of the frame's layout: AMQP 0-9-1, section 1.8.3.12 (basic.ack).
"""

from __future__ import annotations

import asyncio
import struct

from aiormq.abc import AbstractChannel, ChannelFrame

from leasehold.broker.amqp.wire import METHOD, frame
from leasehold.domain.errors import BrokerUnavailable

_ACK = struct.Struct(">IQ?")  # class and method, delivery tag, `multiple`
_BASIC_ACK = 0x3C0050  # class 60 and method 80


def ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    """The frame that acknowledges `tag`. With `multiple`, it acknowledges all tags up to `tag`."""
    return frame(METHOD, channel, _ACK.pack(_BASIC_ACK, tag, multiple))


class Acks:
    """Remembers which deliveries of a channel still need an ACK, because RabbitMQ closes a channel that acknowledges a
    delivery twice. When the channel is lost, `run` raises an error. The other methods then return immediately, without
    an error.
    """

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self._unacked_tags: dict[int, None] = {}  # delivery tags in the order of arrival, which is ascending
        self._settled_tags: list[int] = []  # `run` has still to send the ACKs of these tags
        self._has_settled = asyncio.Event()
        self._nothing_to_send = asyncio.Event()
        self._nothing_to_send.set()

    def delivered(self, tag: int) -> None:
        """Record a delivery that waits for its ACK."""
        self._unacked_tags[tag] = None

    def settle(self, tag: int) -> None:
        """Let `run` send the ACK of the delivery. Ignore a tag that is unknown or already settled."""
        if tag in self._unacked_tags:
            del self._unacked_tags[tag]
            self._settled_tags.append(tag)
            self._nothing_to_send.clear()
            self._has_settled.set()

    async def run(self) -> None:
        """Send the settled ACKs until cancelled. Raises BrokerUnavailable when the channel is closed."""
        try:
            while True:
                await self._has_settled.wait()
                self._has_settled.clear()
                tags, self._settled_tags = self._settled_tags, []
                await self._send(sorted(tags))
                if not self._settled_tags:
                    self._nothing_to_send.set()
        finally:
            self._nothing_to_send.set()  # the rest can never be sent, so `drained` must not wait for it

    async def drained(self) -> None:
        """Return when all ACKs that were settled so far are written to the socket, or when the channel is lost."""
        await self._nothing_to_send.wait()

    async def _send(self, tags: list[int]) -> None:
        """Send the ACKs of `tags` (ascending). One `multiple` ACK covers all tags below the oldest unsettled delivery,
        and each other tag gets an ACK of its own. All ACKs go out in one write. The AMQP client's `basic_ack` would
        need one write for each ACK.
        """
        oldest = next(iter(self._unacked_tags), tags[-1] + 1)  # a number above all tags if none is unsettled
        below_oldest = [tag for tag in tags if tag < oldest]
        acks = [ack(self._channel.number, below_oldest[-1], multiple=True)] if below_oldest else []
        acks += [ack(self._channel.number, tag) for tag in tags[len(below_oldest) :]]
        if self._channel.is_closed:
            raise BrokerUnavailable("the channel closed")
        written = asyncio.get_running_loop().create_future()  # done once the client has written the frame
        await self._channel.connection.write_queue.put(ChannelFrame(b"".join(acks), False, written))
        await written
