"""Decodes the deliveries of one channel from its frames as they arrive.

A delivery comes in frames: one with the method, one with the header, and those with the body. The consumer uses this
module instead of the AMQP client's own decoding. The client makes an object of each frame, passes each object through
two queues, and starts an asyncio task for each delivery. The client's decoding took two fifths of the CPU time of a
busy worker.

Source of the layout: AMQP 0-9-1, sections 2.3.5.2 (content) and 1.8.3.13 (basic.deliver).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pamqp import decode

from leasehold.broker.amqp.wire import BODY, CONTENT, HEADER, METHOD
from leasehold.broker.envelope import MAX_BYTES

_TAG = struct.Struct(">Q?")  # delivery tag, redelivered
_DELIVER = b"\x00\x3c\x00\x3c"  # the class basic (60) and its method deliver (60)
#: The flags in a header. Each says that the message has this property.
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS = 1 << 15, 1 << 14, 1 << 13


@dataclass(slots=True)
class Message:
    """A delivered message. `tag`: the number by which the consumer ACKs the delivery. `size`: the bytes of its whole
    body. `body`: if `size` is above MAX_BYTES, only the beginning of the body is kept. This beginning is itself longer
    than MAX_BYTES, so `envelope.decode` refuses it.
    """

    tag: int
    redelivered: bool
    headers: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0
    body: bytes = b""
    missing_bytes: int | None = None  # bytes of the body that have not arrived; None until the header has arrived


class Deliveries:
    """Reads the deliveries among a channel's frames. Calls `receive` with each message, in the event loop. `receive`
    must not raise.
    """

    def __init__(self, receive: Callable[[Message], None]) -> None:
        self._receive = receive
        self._incoming: Message | None = None

    def __call__(self, kind: int, payload: bytes) -> bool:
        """Handle the frame if it is part of a delivery, and return whether it is.

        `_incoming` is the message whose frames are arriving. One is enough, because on one channel the frames of two
        messages never mix.
        """
        if kind == METHOD:
            if not payload.startswith(_DELIVER):
                return False
            # The two values come after the method's id (4 bytes) and the consumer's tag (its length, then the text).
            tag, redelivered = _TAG.unpack_from(payload, 5 + payload[4])
            self._incoming = Message(tag, redelivered)
            return True
        message = self._incoming
        if message is None:
            return False
        if kind == HEADER:
            _, _, message.size, flags = CONTENT.unpack_from(payload)
            message.missing_bytes = message.size
            if flags & _HEADERS:
                message.headers = _headers(payload[CONTENT.size :], flags)
        elif kind == BODY and message.missing_bytes is not None:
            if len(message.body) <= MAX_BYTES:
                message.body += payload
            message.missing_bytes -= len(payload)
        else:
            return False
        if message.missing_bytes <= 0:
            self._incoming = None
            self._receive(message)
        return True


def _headers(properties: bytes, flags: int) -> Mapping[str, Any]:
    """The headers among the encoded properties. At most two short strings (content type and encoding) come before them.

    Returns no headers if they cannot be decoded, or are nested too deep for the decoder. Anybody who can write to the
    queue may write such headers.
    """
    offset = 0
    try:
        for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
            if flags & flag:
                offset += 1 + properties[offset]
        _, headers = decode.field_table(properties[offset:])
    except (ValueError, IndexError, struct.error, RecursionError):
        return {}
    return headers
