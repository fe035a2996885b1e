"""Acknowledgements of one channel, sent together: no timer, whatever gathered while the last write ran.

Source of the layout: AMQP 0-9-1, section 1.8.3.12 (basic.ack).
"""

from __future__ import annotations

import asyncio
import struct

from aiormq.abc import AbstractChannel, ChannelFrame

from leasehold.broker.amqp.wire import METHOD, frame
from leasehold.domain.errors import BrokerUnavailable

_ACK = struct.Struct(">IQ?")
_BASIC_ACK = 0x3C0050


def ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    """The frame that does it, for all up to `tag` if `multiple`."""
    return frame(METHOD, channel, _ACK.pack(_BASIC_ACK, tag, multiple))


class Acks:
    """Remembers which deliveries of a channel are ours to ack, so that no tag is acked twice.

    (The broker closes a channel that acks an unknown tag.) Nothing here raises or waits for a lost channel.
    """

    def __init__(self, channel: AbstractChannel) -> None:
        self._channel = channel
        self._outstanding: dict[int, None] = {}  # delivery tags in the order of arrival, which is ascending
        self._settled: list[int] = []
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def delivered(self, tag: int) -> None:
        self._outstanding[tag] = None

    def settle(self, tag: int) -> None:
        if tag in self._outstanding:
            del self._outstanding[tag]
            self._settled.append(tag)
            self._idle.clear()
            self._ready.set()

    async def run(self) -> None:
        """Send what is settled, until cancelled or the channel is closed."""
        try:
            while True:
                await self._ready.wait()
                self._ready.clear()
                settled, self._settled = self._settled, []
                await self._send(sorted(settled))
                if not self._settled:
                    self._idle.set()
        finally:
            self._idle.set()  # what is left can never be sent: nobody shall wait for it

    async def drained(self) -> None:
        """Return when everything settled so far is on the wire, or the channel is lost."""
        await self._idle.wait()

    async def _send(self, settled: list[int]) -> None:
        """One `multiple` ACK up to the oldest delivery that somebody still works on, the others' own ones; all in one
        write, which the client's `basic_ack` makes a write each.
        """
        oldest = next(iter(self._outstanding), settled[-1] + 1)
        gather_or_cancel = [tag for tag in settled if tag < oldest]
        acks = [ack(self._channel.number, gather_or_cancel[-1], multiple=True)] if gather_or_cancel else []
        acks += [ack(self._channel.number, tag) for tag in settled[len(gather_or_cancel) :]]
        if self._channel.is_closed:
            raise BrokerUnavailable("the channel closed")
        written = asyncio.get_running_loop().create_future()
        await self._channel.connection.write_queue.put(ChannelFrame(b"".join(acks), False, written))
        await written
