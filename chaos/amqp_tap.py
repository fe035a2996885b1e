"""Listens to AMQP 0-9-1 between a process and the broker. It records when each hint is published, confirmed, delivered
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


class What(StrEnum):
    """What happened to a message on the connection."""

    PUBLISHED = "published"
    CONFIRMED = "confirmed"  # `since`: when it was published
    RETURNED = "returned"
    DELIVERED = "delivered"
    ACKED = "acked"  # `since`: when it was delivered


@dataclass(frozen=True, slots=True)
class Heard:
    """One message that the tap saw. Times are in seconds since 1970. `task`: "" if the message is no hint."""

    process: str
    what: What
    task: str
    at: float
    since: float = 0.0


@dataclass
class _Message:
    """A message whose frames still arrive. `size`: -1 until its header has arrived."""

    method: tuple[int, int]
    tag: int = 0
    size: int = -1
    body: bytearray = field(default_factory=bytearray)


@dataclass
class _Channel:
    published: int = 0  # since confirm.select
    unconfirmed: dict[int, tuple[str, float]] = field(default_factory=dict)
    delivered: dict[int, tuple[str, float]] = field(default_factory=dict)
    coming: dict[bool, _Message] = field(default_factory=dict)  # by direction


class AmqpTap:
    """The Tap of one connection of a process. It calls `hear` for each message that it sees."""

    label = ""

    def __init__(self, process: str, hear: Callable[[Heard], None]) -> None:
        self._process = process
        self._hear = hear
        self._buffers = {True: bytearray(), False: bytearray()}
        self._greeted = False
        self._channels: dict[int, _Channel] = {}

    def request(self, data: bytes) -> None:
        self._buffers[True] += data
        if not self._greeted and len(self._buffers[True]) >= _PROTOCOL_HEADER:
            del self._buffers[True][:_PROTOCOL_HEADER]
            self._greeted = True
        if self._greeted:
            self._frames(asks=True)

    def reply(self, data: bytes) -> None:
        self._buffers[False] += data
        self._frames(asks=False)

    def closed(self) -> None: ...

    def _frames(self, *, asks: bool) -> None:
        buffer = self._buffers[asks]
        while len(buffer) >= _FRAME_HEAD:
            kind, number, size = struct.unpack_from(">BHI", buffer)
            if len(buffer) < _FRAME_HEAD + size + 1:
                return
            payload = bytes(buffer[_FRAME_HEAD : _FRAME_HEAD + size])
            del buffer[: _FRAME_HEAD + size + 1]
            self._frame(kind, self._channels.setdefault(number, _Channel()), number, payload, asks=asks)

    def _frame(self, kind: int, channel: _Channel, number: int, payload: bytes, *, asks: bool) -> None:
        if kind == _METHOD:
            method: tuple[int, int] = struct.unpack_from(">HH", payload)
            if method == _CHANNEL_OPEN:
                self._channels[number] = _Channel()
            elif method in (_PUBLISH, _RETURN, _DELIVER):
                channel.coming[asks] = _Message(method, _tag_of_delivery(payload) if method == _DELIVER else 0)
            elif method == _CONFIRM_SELECT:
                channel.published = 0
            elif method in (_ACK, _NACK):
                self._settle(channel, payload, asks=asks, good=method == _ACK)
        elif message := channel.coming.get(asks):
            if kind == _HEADER:
                (message.size,) = struct.unpack_from(">Q", payload, 4)
            elif kind == _BODY:
                message.body += payload
            if message.size == len(message.body):
                del channel.coming[asks]
                self._message(channel, message)

    def _message(self, channel: _Channel, message: _Message) -> None:
        task, now = _task_of(bytes(message.body)), time.time()
        if message.method == _PUBLISH:
            channel.published += 1
            channel.unconfirmed[channel.published] = (task, now)
            self._hear(Heard(self._process, What.PUBLISHED, task, now))
        elif message.method == _DELIVER:
            channel.delivered[message.tag] = (task, now)
            self._hear(Heard(self._process, What.DELIVERED, task, now))
        else:
            # The broker also confirms a returned message, which no worker will get: that confirm must not count.
            number = next((n for n, (published, _) in channel.unconfirmed.items() if published == task), None)
            if number is not None:
                del channel.unconfirmed[number]
            self._hear(Heard(self._process, What.RETURNED, task, now))

    def _settle(self, channel: _Channel, payload: bytes, *, asks: bool, good: bool) -> None:
        tag, multiple = struct.unpack_from(">QB", payload, 4)
        waiting = channel.delivered if asks else channel.unconfirmed
        settled = [n for n in waiting if n == tag or (multiple & 1 and (n <= tag or tag == 0))]
        for number in settled:
            task, since = waiting.pop(number)
            if good:
                self._hear(Heard(self._process, What.ACKED if asks else What.CONFIRMED, task, time.time(), since))


def _tag_of_delivery(payload: bytes) -> int:
    length = payload[4]  # of the consumer tag
    tag: int = struct.unpack_from(">Q", payload, 5 + length)[0]
    return tag


def _task_of(body: bytes) -> str:
    try:
        return str(decode(body).task_id)
    except Garbage:
        return ""
