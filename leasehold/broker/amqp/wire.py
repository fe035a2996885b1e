"""Splits the bytes of one connection into AMQP frames, between the socket and the AMQP client.

A consumer or publisher registers a handler for its channel. The handler gets the channel's frames as they arrive,
before the AMQP client gets them. All other frames go on to the client unchanged. A publisher can send many frames with
one write (`Wire.write`). The client would need one write for each frame.

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

_FRAME = struct.Struct(">BHI")  # type, channel, size of the payload; after the payload comes an end byte
#: The last byte of each frame.
_END = 0xCE
#: A heartbeat frame, with which each side shows that it lives.
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
#: While the handlers take all frames, `_Reader` gives the client an invented heartbeat at this interval, in seconds.
#: Otherwise the client would consider the connection dead, because it gets no frames, and because a broker that
#: delivers messages sends no heartbeats.
_ALIVE_SECONDS = 1.0
#: No broker agrees to larger frames. So a peer that sends a larger frame does not speak AMQP.
_MAX_BYTES = 16 * 1024 * 1024

#: The kinds of frames.
METHOD, HEADER, BODY = 1, 2, 3
#: The beginning of a content header: class, weight, size of the body, flags of the properties.
CONTENT = struct.Struct(">HHQH")

#: Gets the kind (METHOD, HEADER or BODY) and the payload of a frame. Returns True if it has handled the frame, and
#: False if the frame is for the client. The handler is called in the event loop, and must not raise.
FrameHandler = Callable[[int, bytes], bool]


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    return b"%b%b\xce" % (_FRAME.pack(kind, channel, len(payload)), payload)


class Sieve:
    """Divides the incoming frames. A channel's handler takes the frames that it can handle, and the client gets all
    others.
    """

    def __init__(self) -> None:
        # By channel.
        self._handlers: dict[int, FrameHandler] = {}
        self._half_frame = b""
        # False once the broker has sent bytes that are no AMQP frames.
        self._is_amqp = True

    def attach(self, channel: int, handler: FrameHandler) -> None:
        """Let `handler` get the frames of the channel."""
        self._handlers[channel] = handler

    def detach(self, channel: int, handler: FrameHandler) -> None:
        """Stop giving frames to `handler`. Does nothing if a new channel with the same number has another handler."""
        if self._handlers.get(channel) is handler:
            del self._handlers[channel]

    @property
    def has_handlers(self) -> bool:
        """Whether frames may go to a handler instead of the client."""
        return bool(self._handlers)

    def sift(self, data: bytes) -> bytes:
        """The part of `data` that is for the client: whole frames, in order, without those that a handler took. If
        `data` ends within a frame, the beginning of this frame waits for the next bytes.
        """
        if not self._is_amqp:
            return data
        if self._half_frame:
            data, self._half_frame = self._half_frame + data, b""
        client_parts: list[bytes] = []
        # Frames for the client that follow each other are copied together, from `copied_until` to the next frame that a
        # handler took.
        copied_until, position, size = 0, 0, len(data)
        while size - position >= _FRAME.size:
            kind, channel, length = _FRAME.unpack_from(data, position)
            start, end = position + _FRAME.size, position + _FRAME.size + length
            if length > _MAX_BYTES or (end < size and data[end] != _END):
                self._is_amqp = False  # from here on the client gets all bytes, and reports the error
                return b"".join((*client_parts, data[copied_until:]))
            if end >= size:
                break  # the rest is half a frame
            handler = self._handlers.get(channel)
            if handler is not None and METHOD <= kind <= BODY and handler(kind, data[start:end]):
                client_parts.append(data[copied_until:position])
                copied_until = end + 1
            position = end + 1
        client_parts.append(data[copied_until:position])
        self._half_frame = data[position:]
        return b"".join(client_parts)


class Wire(TransportFactory):
    """The transport of one connection, with its sieve."""

    def __init__(self) -> None:
        self.sieve = Sieve()
        self._reader: _Reader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def silence(self) -> float:
        """Seconds since the last byte from the broker, or since the connection opened; 0.0 before that."""
        return 0.0 if self._reader is None or self._writer is None else self._reader.silence

    def write(self, frames: bytes) -> None:
        """Send whole frames of an open channel; returns immediately. Raises BrokerUnavailable."""
        if self._writer is None or self._writer.is_closing():
            raise BrokerUnavailable("the connection closed")
        self._writer.write(frames)

    def abort(self) -> None:
        """Drop the connection without a closing handshake, because the broker would not answer."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The client calls this to connect. Raises AMQPConnectionError."""
        ssl_contexts = kwargs.pop("ssl_context_provider")
        ssl = await ssl_contexts.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = self._reader = _Reader(self.sieve, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, url.host or "", url.port or 0, ssl=ssl, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        reader.restart_clocks()
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        return reader, self._writer


class _Reader(asyncio.StreamReader):
    """The AMQP client's reader. It gets the bytes that the sieve leaves."""

    def __init__(self, sieve: Sieve, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._sieve = sieve
        self._clock = loop.time
        self._client_fed_at = self._last_byte_at = loop.time()

    @property
    def silence(self) -> float:
        return self._clock() - self._last_byte_at

    def restart_clocks(self) -> None:
        """Count the silence from now on. Call this when the connection is open, so the time for TCP and TLS does not
        count.
        """
        self._client_fed_at = self._last_byte_at = self._clock()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        client_bytes = self._sieve.sift(bytes(data))
        now = self._last_byte_at = self._clock()
        if not client_bytes and self._sieve.has_handlers and now - self._client_fed_at > _ALIVE_SECONDS:
            client_bytes = _HEARTBEAT
        if client_bytes:
            self._client_fed_at = now
            super().feed_data(client_bytes)
