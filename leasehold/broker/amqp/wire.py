"""The frames of one connection, as they come and go.

What a channel's taker wants is cut out of the bytes as they arrive, before the AMQP client sees them, and everything
else goes on to the client as it came. What the client would write in many pieces can be written in one.

Source of the layout: AMQP 0-9-1, sections 2.3.5 (frames) and 2.3.5.2 (content).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from yarl import URL

from leasehold.domain.errors import BrokerUnavailable

_FRAME = struct.Struct(">BHI")  # type, channel, size of what follows, before an end byte
_END = 0xCE
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
#: The client calls a connection dead that says nothing for long, and a broker that delivers sends no heartbeats.
_ALIVE_SECONDS = 1.0
#: No broker agrees on larger frames; who says so is none.
_MOST_BYTES = 16 * 1024 * 1024

METHOD, HEADER, BODY = 1, 2, 3
#: How a header begins: class and weight, the size of the body, which properties there are.
CONTENT = struct.Struct(">HHQH")

#: Whether it took the frame, told by its kind and what it carries. Called in the event loop; it must not raise.
Take = Callable[[int, bytes], bool]


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"%b%b\xce" % (_FRAME.pack(kind, channel, len(payload)), payload)


class Sieve:
    """What of a connection is taken: the methods and contents of some channels."""

    def __init__(self) -> None:
        self._takers: dict[int, Take] = {}
        self._rest = b""
        self._is_amqp = True

    def take(self, channel: int, taker: Take) -> None:
        """From now on."""
        self._takers[channel] = taker

    def leave(self, channel: int, taker: Take) -> None:
        """No more of them. Does nothing when the channel's number is already somebody else's."""
        if self._takers.get(channel) is taker:
            del self._takers[channel]

    def sift(self, data: bytes) -> bytes:
        """What of `data` is for the client: whole frames, in order; half a frame waits for its other half."""
        if not self._is_amqp:
            return data
        if self._rest:
            data, self._rest = self._rest + data, b""
        others: list[bytes] = []
        kept, at, size = 0, 0, len(data)
        while size - at >= _FRAME.size:
            kind, channel, length = _FRAME.unpack_from(data, at)
            start, end = at + _FRAME.size, at + _FRAME.size + length
            if length > _MOST_BYTES or (end < size and data[end] != _END):
                self._is_amqp = False  # the client knows what to say of it
                return b"".join((*others, data[kept:]))
            if end >= size:
                break
            taker = self._takers.get(channel)
            if taker is not None and METHOD <= kind <= BODY and taker(kind, data[start:end]):
                others.append(data[kept:at])
                kept = end + 1
            at = end + 1
        others.append(data[kept:at])
        self._rest = data[at:]
        return b"".join(others)


class Wire(TransportFactory):
    """One connection's way to the broker."""

    def __init__(self) -> None:
        self.sieve = Sieve()
        self._writer: asyncio.StreamWriter | None = None

    def write(self, frames: bytes) -> None:
        """Send whole frames of an open channel; returns at once. Raises BrokerUnavailable."""
        if self._writer is None or self._writer.is_closing():
            raise BrokerUnavailable("the connection closed")
        self._writer.write(frames)

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Called by the client. Raises AMQPConnectionError."""
        contexts = kwargs.pop("ssl_context_provider")
        ssl = await contexts.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = _Reader(self.sieve, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, url.host or "", url.port or 0, ssl=ssl, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return reader, self._writer


class _Reader(asyncio.StreamReader):
    """What the client reads from."""

    def __init__(self, sieve: Sieve, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._sieve = sieve
        self._clock = loop.time
        self._fed_at = loop.time()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        others = self._sieve.sift(bytes(data))
        now = self._clock()
        if not others and now - self._fed_at > _ALIVE_SECONDS:
            others = _HEARTBEAT
        if others:
            self._fed_at = now
            super().feed_data(others)
