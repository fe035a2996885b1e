"""Deliveries, taken off the wire before the AMQP client sees them.

The client reads a delivery in nine steps, makes objects of its three frames, passes each through two queues, and starts
a task for the message: that was two fifths of a busy worker's CPU. Here a delivery is cut out of the bytes as they
arrive, and everything else that the broker says goes on to the client as it came.

Source of the layout: AMQP 0-9-1, sections 2.3.5 (frames), 2.3.5.2 (content) and 1.8.3.13 (basic.deliver).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsIndex

from aiormq.connection import TransportFactory
from aiormq.exceptions import AMQPConnectionError
from pamqp import decode
from yarl import URL

_FRAME = struct.Struct(">BHI")  # type, channel, size of what follows, before an end byte
_TAG = struct.Struct(">Q?")  # delivery tag, redelivered
_CONTENT = struct.Struct(">xxxxQH")  # class and weight, size of the body, which properties there are
_ACK = struct.Struct(">BHIIQ?B")
_METHOD, _HEADER, _BODY, _END = 1, 2, 3, 0xCE
_DELIVER, _BASIC_ACK = b"\x00\x3c\x00\x3c", 0x3C0050
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 1 << 15, 1 << 14, 1 << 13
_HEARTBEAT = b"\x08\x00\x00\x00\x00\x00\x00\xce"
#: The client calls a connection dead that says nothing for long, and a broker that delivers sends no heartbeats.
_ALIVE_SECONDS = 1.0
#: No broker agrees on larger frames; who says so is none.
_MOST_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class Message:
    """What was delivered on a channel."""

    tag: int
    redelivered: bool
    headers: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""
    missing: int = -1  # bytes of the body that are to come; -1 before its size is known


Take = Callable[[Message], None]


class Deliveries:
    """The deliveries of one connection: each goes to who takes its channel's, in the event loop, one after another."""

    def __init__(self) -> None:
        self._takers: dict[int, Take] = {}
        self._begun: dict[int, Message] = {}
        self._rest = b""
        self._is_amqp = True

    def take(self, channel: int, taker: Take) -> None:
        """From now on. `taker` must not raise."""
        self._takers[channel] = taker

    def leave(self, channel: int, taker: Take) -> None:
        """No more of them. Does nothing when the channel's number is already somebody else's."""
        if self._takers.get(channel) is taker:
            del self._takers[channel]
            self._begun.pop(channel, None)

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
            if channel in self._takers and self._is_delivered(kind, channel, data, start, end):
                others.append(data[kept:at])
                kept = end + 1
            at = end + 1
        others.append(data[kept:at])
        self._rest = data[at:]
        return b"".join(others)

    def _is_delivered(self, kind: int, channel: int, data: bytes, start: int, end: int) -> bool:
        """Take the frame if it is part of a delivery. The frames of a channel's message follow one another."""
        if kind == _METHOD:
            if data[start : start + 4] != _DELIVER:
                return False
            tag, redelivered = _TAG.unpack_from(data, start + 5 + data[start + 4])  # after the consumer's name
            self._begun[channel] = Message(tag, redelivered)
            return True
        message = self._begun.get(channel)
        if message is None or kind not in (_HEADER, _BODY):
            return False
        if kind == _HEADER:
            message.missing, properties = _CONTENT.unpack_from(data, start)
            if properties & _HEADERS:
                message.headers = _headers(data[start + _CONTENT.size : end], properties)
        else:
            message.body += data[start:end]
            message.missing -= end - start
        if message.missing <= 0:
            del self._begun[channel]
            self._takers[channel](message)
        return True


def _headers(properties: bytes, there: int) -> Mapping[str, Any]:
    """The headers among the encoded properties, before which at most two short strings come.

    Whoever can write to a queue may write what nobody can read: that has none.
    """
    at = 0
    try:
        for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
            if there & flag:
                at += 1 + properties[at]
        _, headers = decode.field_table(properties[at:])
    except (ValueError, IndexError, struct.error):
        return {}
    return headers


def ack(channel: int, tag: int, *, multiple: bool = False) -> bytes:
    """The frame of a basic.ack."""
    return _ACK.pack(_METHOD, channel, 13, _BASIC_ACK, tag, multiple, _END)


class Wire(TransportFactory):
    """One connection's way to the broker, by which its deliveries are taken."""

    def __init__(self) -> None:
        self.deliveries = Deliveries()

    async def create(self, url: URL, **kwargs: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Called by the client. Raises AMQPConnectionError."""
        contexts = kwargs.pop("ssl_context_provider")
        ssl = await contexts.get_context() if url.scheme == "amqps" else None
        loop = asyncio.get_running_loop()
        reader = _Reader(self.deliveries, loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            transport, _ = await loop.create_connection(
                lambda: protocol, url.host or "", url.port or 0, ssl=ssl, **kwargs
            )
        except OSError as error:
            raise AMQPConnectionError(*error.args) from error
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _Reader(asyncio.StreamReader):
    """What the client reads from."""

    def __init__(self, deliveries: Deliveries, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._deliveries = deliveries
        self._clock = loop.time
        self._fed_at = loop.time()

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        others = self._deliveries.sift(bytes(data))
        now = self._clock()
        if not others and now - self._fed_at > _ALIVE_SECONDS:
            others = _HEARTBEAT
        if others:
            self._fed_at = now
            super().feed_data(others)
