"""Reads the AMQP 0-9-1 between a process and the broker, and records when each hint is published, confirmed, delivered
and acknowledged.

Source of the frames' layout: the AMQP 0-9-1 specification, sections 2.3.5 and 4.2, and RabbitMQ's confirm.select.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from leasehold.broker.envelope import Garbage, decode

_METHOD, _HEADER, _BODY = 1, 2, 3
_FRAME_HEAD = 7
_PROTOCOL_HEADER = 8
_PUBLISH, _RETURN, _DELIVER, _ACK, _NACK = (60, 40), (60, 50), (60, 60), (60, 80), (60, 120)
_CHANNEL_OPEN, _CONFIRM_SELECT = (20, 10), (85, 10)


class HintEvent(StrEnum):
    """What happened to a hint on the connection."""

    PUBLISHED = "published"
    CONFIRMED = "confirmed"  # `since`: when it was published
    RETURNED = "returned"
    DELIVERED = "delivered"
    ACKED = "acked"  # `since`: when it was delivered


@dataclass(frozen=True, slots=True)
class HintRecord:
    """One event of one message. Times are in seconds since 1970. `task`: its id; "" if the message is not a hint."""

    process: str
    event: HintEvent
    task: str
    at: float
    since: float = 0.0


@dataclass
class _Message:
    """A message of which some frames have not arrived. `size`: -1 until its header has arrived."""

    method: tuple[int, int]
    tag: int = 0
    size: int = -1
    body: bytearray = field(default_factory=bytearray)


@dataclass
class _Channel:
    published: int = 0  # the number of messages since confirm.select
    unconfirmed: dict[int, tuple[str, float]] = field(default_factory=dict)
    delivered: dict[int, tuple[str, float]] = field(default_factory=dict)
    incoming: dict[bool, _Message] = field(default_factory=dict)  # True: from the client; False: from the broker


class AmqpTap:
    """Reads the bytes of one AMQP connection of a process, and calls `record` for each event of a hint."""

    label = ""

    def __init__(self, process: str, record: Callable[[HintRecord], None]) -> None:
        self._process = process
        self._record = record
        self._buffers = {True: bytearray(), False: bytearray()}
        self._greeted = False
        self._channels: dict[int, _Channel] = {}

    def request(self, data: bytes) -> None:
        self._buffers[True] += data
        if not self._greeted and len(self._buffers[True]) >= _PROTOCOL_HEADER:
            del self._buffers[True][:_PROTOCOL_HEADER]
            self._greeted = True
        if self._greeted:
            self._read_frames(from_client=True)

    def reply(self, data: bytes) -> None:
        self._buffers[False] += data
        self._read_frames(from_client=False)

    def closed(self) -> None: ...

    def _read_frames(self, *, from_client: bool) -> None:
        buffer = self._buffers[from_client]
        while len(buffer) >= _FRAME_HEAD:
            kind, number, size = struct.unpack_from(">BHI", buffer)
            if len(buffer) < _FRAME_HEAD + size + 1:
                return
            payload = bytes(buffer[_FRAME_HEAD : _FRAME_HEAD + size])
            del buffer[: _FRAME_HEAD + size + 1]
            self._read_frame(
                kind, self._channels.setdefault(number, _Channel()), number, payload, from_client=from_client
            )

    def _read_frame(self, kind: int, channel: _Channel, number: int, payload: bytes, *, from_client: bool) -> None:
        if kind == _METHOD:
            method: tuple[int, int] = struct.unpack_from(">HH", payload)
            if method == _CHANNEL_OPEN:
                self._channels[number] = _Channel()
            elif method in (_PUBLISH, _RETURN, _DELIVER):
                channel.incoming[from_client] = _Message(method, _tag_of_delivery(payload) if method == _DELIVER else 0)
            elif method == _CONFIRM_SELECT:
                channel.published = 0
            elif method in (_ACK, _NACK):
                self._record_settled(channel, payload, from_client=from_client, is_ack=method == _ACK)
        elif message := channel.incoming.get(from_client):
            if kind == _HEADER:
                (message.size,) = struct.unpack_from(">Q", payload, 4)
            elif kind == _BODY:
                message.body += payload
            if message.size == len(message.body):
                del channel.incoming[from_client]
                self._record_message(channel, message)

    def _record_message(self, channel: _Channel, message: _Message) -> None:
        task, now = _task_of(bytes(message.body)), time.time()
        if message.method == _PUBLISH:
            channel.published += 1
            channel.unconfirmed[channel.published] = (task, now)
            self._record(HintRecord(self._process, HintEvent.PUBLISHED, task, now))
        elif message.method == _DELIVER:
            channel.delivered[message.tag] = (task, now)
            self._record(HintRecord(self._process, HintEvent.DELIVERED, task, now))
        else:
            # No worker gets a returned message. The broker confirms it all the same: that confirm must not count.
            number = next((tag for tag, (hinted, _) in channel.unconfirmed.items() if hinted == task), None)
            if number is not None:
                del channel.unconfirmed[number]
            self._record(HintRecord(self._process, HintEvent.RETURNED, task, now))

    def _record_settled(self, channel: _Channel, payload: bytes, *, from_client: bool, is_ack: bool) -> None:
        tag, multiple = struct.unpack_from(">QB", payload, 4)
        unsettled = channel.delivered if from_client else channel.unconfirmed
        settled = [number for number in unsettled if number == tag or (multiple & 1 and (number <= tag or tag == 0))]
        for number in settled:
            task, since = unsettled.pop(number)
            if is_ack:
                self._record(
                    HintRecord(
                        self._process, HintEvent.ACKED if from_client else HintEvent.CONFIRMED, task, time.time(), since
                    )
                )


def _tag_of_delivery(payload: bytes) -> int:
    length = payload[4]  # of the consumer tag
    tag: int = struct.unpack_from(">Q", payload, 5 + length)[0]
    return tag


def _task_of(body: bytes) -> str:
    try:
        return str(decode(body).task_id)
    except Garbage:
        return ""
