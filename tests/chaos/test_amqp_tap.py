from __future__ import annotations

import struct
from collections.abc import Callable
from uuid import UUID

import pytest

from chaos.amqp_tap import AmqpTap, HintEvent, HintRecord
from leasehold.broker.base import Hint
from leasehold.broker.envelope import encode

TASK = "01a1fb2b-4b4e-7039-911c-cb764c412cd7"
BODY = encode(Hint(UUID(TASK), "media", tenant="acme"))


def frame(kind: int, payload: bytes, channel: int = 1) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    return frame(1, struct.pack(">HH", class_id, method_id) + arguments)


def content(body: bytes = BODY, pieces: int = 2) -> bytes:
    size = -(-len(body) // pieces)
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return frame(2, struct.pack(">HHQH", 60, 0, len(body), 0)) + b"".join(frame(3, part) for part in parts)


PUBLISH = method(60, 40, b"\0\0\0\5queue\1") + content()
RETURN = method(60, 50, b"\1\x38\2no\0\5queue") + content()


def deliver(tag: int) -> bytes:
    return method(60, 60, b"\3ctg" + struct.pack(">QB", tag, 0) + b"\0\5queue") + content()


def ack(tag: int, *, multiple: bool = False, nack: bool = False) -> bytes:
    return method(60, 120 if nack else 80, struct.pack(">QB", tag, multiple))


@pytest.fixture
def records() -> list[HintRecord]:
    return []


@pytest.fixture
def tap(records: list[HintRecord]) -> AmqpTap:
    tap = AmqpTap("worker-0.0", records.append)
    tap.request(b"AMQP\0\0\x09\1" + method(20, 10, b"\0") + method(85, 10, b"\0"))
    return tap


def events_of(records: list[HintRecord]) -> list[tuple[HintEvent, str]]:
    return [(record.event, record.task) for record in records]


def in_bytes(pass_on: Callable[[bytes], None], data: bytes) -> None:
    for index in range(len(data)):
        pass_on(data[index : index + 1])


def test_a_publish_and_its_confirm_are_heard_however_the_bytes_are_cut(tap: AmqpTap, records: list[HintRecord]) -> None:
    in_bytes(tap.request, PUBLISH)
    in_bytes(tap.reply, ack(1))
    assert events_of(records) == [(HintEvent.PUBLISHED, TASK), (HintEvent.CONFIRMED, TASK)]
    assert records[1].since == records[0].at


def test_one_ack_can_confirm_many(tap: AmqpTap, records: list[HintRecord]) -> None:
    tap.request(PUBLISH * 3)
    tap.reply(ack(2, multiple=True))
    assert events_of(records)[3:] == [(HintEvent.CONFIRMED, TASK)] * 2


def test_a_returned_message_is_not_confirmed_by_the_ack_that_follows(tap: AmqpTap, records: list[HintRecord]) -> None:
    tap.request(PUBLISH)
    tap.reply(RETURN + ack(1))
    assert events_of(records) == [(HintEvent.PUBLISHED, TASK), (HintEvent.RETURNED, TASK)]


def test_a_nack_confirms_nothing(tap: AmqpTap, records: list[HintRecord]) -> None:
    tap.request(PUBLISH)
    tap.reply(ack(1, nack=True))
    assert events_of(records) == [(HintEvent.PUBLISHED, TASK)]


def test_the_ack_of_a_delivery_tells_when_it_was_delivered(tap: AmqpTap, records: list[HintRecord]) -> None:
    tap.reply(deliver(1) + deliver(2))
    tap.request(ack(2))
    assert events_of(records) == [(HintEvent.DELIVERED, TASK)] * 2 + [(HintEvent.ACKED, TASK)]
    assert records[2].since == records[1].at


def test_what_is_no_hint_of_this_version_has_no_task(tap: AmqpTap, records: list[HintRecord]) -> None:
    for body in (BODY.replace(b'"v":', b'"v":9'), b"\xff", b"[]", b"{}"):
        tap.request(method(60, 40, b"\0\0\0\5queue\1") + content(body, pieces=1))
    assert events_of(records) == [(HintEvent.PUBLISHED, "")] * 4
