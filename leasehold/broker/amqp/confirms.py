"""Encodes messages, and matches RabbitMQ's confirms with them, so that the publisher can write many messages at
once.

The publisher uses this module instead of the AMQP client's own publishing. For each message, the client makes three
objects for the frames, starts an asyncio task, and waits for the write. That took 0.1 ms of CPU time per message.

Source of the frames' layout: AMQP 0-9-1, sections 1.8.3.7 (basic.publish), 1.8.3.10 (basic.return), 1.8.3.12
(basic.ack), and RabbitMQ's extension basic.nack. Source of the order (a message is returned before it is confirmed):
RabbitMQ's guide to publisher confirms.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pamqp import encode

from leasehold.broker.amqp.wire import BODY, CONTENT, HEADER, METHOD, frame

_BASIC = 60  # the number of AMQP's class `basic`, to which the methods below belong
#: The ids of the methods. An id has the class in its upper two bytes, and the method's number in its lower two bytes.
_PUBLISH, _RETURN, _ACK, _NACK = 0x3C0028, 0x3C0032, 0x3C0050, 0x3C0078
_METHOD_ID = struct.Struct(">I")  # the payload of a method frame begins with the method's id
_TAG = struct.Struct(">QB")  # the delivery tag, and a byte whose first bit (`multiple`) means "all tags up to this tag"
_PUBLISH_HEAD = struct.Struct(">IHB")  # the method, a reserved zero, the length of the default exchange's empty name
_MANDATORY = 1  # the first bit of basic.publish: return the message if its queue does not exist
#: The flags of the properties that a content header has.
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_JSON = b"\x10application/json"  # a short string is its length, and then the text
_PERSISTENT = 2  # the delivery mode
#: The largest payload of a frame that every broker must accept (section 1.4.2.6, frame-max). The body of a hint (a
#: message that a task is due) has about 100 bytes.
_MAX_BYTES = 4096 - 8


def publish_frames(channel: int, queue: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """The frames of a mandatory, persistent message to `queue`. Raises ValueError when AMQP cannot encode it."""
    name = queue.encode()
    property_flags = _CONTENT_TYPE | (_HEADERS if headers else 0) | _DELIVERY_MODE
    try:
        method = _PUBLISH_HEAD.pack(_PUBLISH, 0, 0) + bytes((len(name),)) + name + bytes((_MANDATORY,))
        table = encode.field_table(dict(headers)) if headers else b""
    except (TypeError, ValueError, struct.error) as error:
        raise ValueError("AMQP cannot encode the queue name or a header") from error
    header = CONTENT.pack(_BASIC, 0, len(body), property_flags) + _JSON + table + bytes((_PERSISTENT,))
    if max(len(header), len(body)) > _MAX_BYTES:
        raise ValueError("the message is too large for one frame")
    return frame(METHOD, channel, method) + frame(HEADER, channel, header) + frame(BODY, channel, body)


class Window:
    """The messages (one or more) of one write. `confirmed`: for each message, whether RabbitMQ accepted it into its
    queue. `returned`: for each message, whether RabbitMQ returned it because the queue does not exist. `settled`: a
    future; once it is done, `confirmed` is final. `has_refusals`: whether RabbitMQ has refused a message (basic.nack).
    """

    def __init__(self, messages: Sequence[tuple[str, bytes]]) -> None:
        self.messages = messages
        self.confirmed = [False] * len(messages)
        self.returned = [False] * len(messages)
        self.has_refusals = False
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unconfirmed = len(messages)

    def settle(self, index: int, *, ok: bool) -> None:
        """Record RabbitMQ's answer for a message. `ok`: True for a confirm, and False for a refusal."""
        self.confirmed[index] = ok and not self.returned[index]
        self.has_refusals = self.has_refusals or not ok
        self._unconfirmed -= 1
        if not self._unconfirmed:
            self.complete()

    def complete(self) -> None:
        """Complete `settled`, because no further confirm will come."""
        if not self.settled.done():
            self.settled.set_result(None)


@dataclass(slots=True)
class _Return:
    """A message that RabbitMQ returns. Until `missing_bytes` is 0, some frames of the message have not arrived."""

    queue: str
    body: bytes = b""
    missing_bytes: int = 0


class Confirms:
    """Reads the confirms and returned messages among a channel's frames. When RabbitMQ returns a message, because its
    queue does not exist, `on_return(queue)` is called.
    """

    def __init__(self, on_return: Callable[[str], None]) -> None:
        self._on_return = on_return
        self._last_tag = 0  # the delivery tag of the message that was written last; the first message has tag 1
        #: The delivery tag of a message -> the message's window, and its index there. The tags ascend.
        self._waiting: dict[int, tuple[Window, int]] = {}
        self._arriving_return = _Return("")

    def sent(self, messages: Sequence[tuple[str, bytes]]) -> Window:
        """Record that the caller has just written these messages (queue and body), in this order."""
        window = Window(messages)
        for index in range(len(messages)):
            self._last_tag += 1
            self._waiting[self._last_tag] = (window, index)
        return window

    def abandon(self) -> None:
        """Complete the windows of all waiting messages, because the channel is closed and no confirm will come."""
        waiting_messages, self._waiting = self._waiting, {}
        for window, _ in waiting_messages.values():
            window.complete()

    def __call__(self, kind: int, payload: bytes) -> bool:
        """Handle a frame of the channel: a confirm, a refusal, or a part of a returned message. `kind`: METHOD, HEADER
        or BODY. Returns False for any other frame.
        """
        if kind != METHOD:  # on a channel that only publishes, only returned messages have content
            self._take_content(kind, payload)
            return True
        (method,) = _METHOD_ID.unpack_from(payload)
        if method == _RETURN:
            self._arriving_return = _Return(_queue_of(payload))
        elif method in (_ACK, _NACK):
            tag, bits = _TAG.unpack_from(payload, _METHOD_ID.size)
            self._take_confirm(tag, multiple=bool(bits & 1), ok=method == _ACK)
        else:
            return False
        return True

    def _take_confirm(self, tag: int, *, multiple: bool, ok: bool) -> None:
        # `multiple`: the answer holds for all waiting messages up to this tag.
        settled_tags = list(takewhile(lambda sent_tag: sent_tag <= tag, self._waiting)) if multiple else [tag]
        for settled_tag in settled_tags:
            window_and_index = self._waiting.pop(settled_tag, None)
            if window_and_index is not None:
                window, index = window_and_index
                window.settle(index, ok=ok)

    def _take_content(self, kind: int, payload: bytes) -> None:
        # After basic.return comes a header frame with the size of the body, and then the body in any number of frames.
        message = self._arriving_return
        if kind == HEADER:
            _, _, message.missing_bytes, _ = CONTENT.unpack_from(payload)
        else:
            message.body += payload
            message.missing_bytes -= len(payload)
        if message.missing_bytes <= 0:
            self._take_return(message.queue, message.body)

    def _take_return(self, queue: str, body: bytes) -> None:
        """Mark the message as returned. A return has no tag, so the queue and the body identify the message. After the
        return RabbitMQ also confirms the message. Because of the mark, `Window.settle` then does not record the message
        as accepted.
        """
        self._on_return(queue)
        for window, index in self._waiting.values():
            if window.messages[index] == (queue, body) and not window.returned[index]:
                window.returned[index] = True
                return


def _queue_of(payload: bytes) -> str:
    """The routing key of a basic.return, which is the queue's name. It comes after the code (two bytes), the text and
    the exchange. Text, exchange and routing key each begin with their length.
    """
    offset = _METHOD_ID.size + 2
    for _ in ("text", "exchange"):
        offset += 1 + payload[offset]
    return payload[offset + 1 : offset + 1 + payload[offset]].decode()
