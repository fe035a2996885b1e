"""Deliveries are cut out of the stream wherever it was cut into pieces; all else reaches the client as it came."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp.body import ContentBody
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat
from yarl import URL

from leasehold.broker.amqp.acks import ack
from leasehold.broker.amqp.deliveries import Deliveries, Message
from leasehold.broker.amqp.wire import CONTENT, HEADER, METHOD, Sieve, Wire, _Reader, frame
from leasehold.broker.envelope import MAX_BYTES, Garbage, decode
from tests.support.patient import patient

TAKEN, OTHER = 3, 4
PROPERTIES = [
    spec.Basic.Properties(),
    spec.Basic.Properties(content_type="application/json", delivery_mode=2),
    spec.Basic.Properties(
        content_type="t", content_encoding="e", headers={"traceparent": "00-1", "x-delivery-count": 2}
    ),
    spec.Basic.Properties(headers={"a": "b"}, message_id="m", timestamp=None),
    spec.Basic.Properties(content_type="application/json", headers={"traceparent": "00-1"}, delivery_mode=2),
]


def frames_of(channel: int, tag: int, body: bytes, properties: spec.Basic.Properties, parts: int = 1) -> list[bytes]:
    """A delivery, its body in `parts` frames."""
    deliver = spec.Basic.Deliver(consumer_tag="ctag", delivery_tag=tag, redelivered=tag % 2 == 0, routing_key="q")
    size = max(1, -(-len(body) // parts))
    bodies = [ContentBody(body[at : at + size]) for at in range(0, len(body), size)]
    header = ContentHeader(0, len(body), properties)
    return [marshal(deliver, channel), marshal(header, channel), *(marshal(one, channel) for one in bodies)]


def sifted(pieces: list[bytes]) -> tuple[bytes, list[Message]]:
    sieve, messages = Sieve(), list[Message]()
    sieve.attach(TAKEN, Deliveries(messages.append))
    return b"".join(sieve.sift(piece) for piece in pieces), messages


PARTS = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.binary(max_size=200), st.sampled_from(PROPERTIES), st.integers(1, 3)),
        st.just("another channel"),
        st.just("heartbeat"),
        st.just("method"),
    ),
    max_size=8,
)


@patient
@given(PARTS, st.data())
def test_wherever_the_stream_is_cut_the_same_is_taken_and_the_same_is_left(
    parts: list[object], data: st.DataObject
) -> None:
    stream, others, expected = b"", b"", []
    for tag, part in enumerate(parts, start=1):
        if isinstance(part, tuple):
            _, body, properties, pieces = part
            stream += b"".join(frames_of(TAKEN, tag, body, properties, pieces))
            expected.append((tag, tag % 2 == 0, body, dict(properties.headers or {})))
            continue
        if part == "another channel":
            left = b"".join(frames_of(OTHER, tag, b"theirs", PROPERTIES[2]))
        elif part == "heartbeat":
            left = marshal(Heartbeat(), 0)
        else:
            left = marshal(spec.Basic.Cancel(consumer_tag="ctag"), TAKEN)
        stream, others = stream + left, others + left
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    left, messages = sifted(pieces)
    assert left == others
    assert [(m.tag, m.redelivered, m.body, dict(m.headers)) for m in messages] == expected


@pytest.mark.parametrize("properties", PROPERTIES)
def test_the_headers_of_a_message_are_found_whatever_stands_before_them(properties: spec.Basic.Properties) -> None:
    left, (message,) = sifted(frames_of(TAKEN, 1, b"body", properties))
    assert (left, message.body, message.headers) == (b"", b"body", properties.headers or {})


def test_content_that_no_delivery_announced_is_left_to_the_client() -> None:
    """A body without its header, too. The client then closes the connection, or knows what it asked for."""
    deliver, header, body = frames_of(TAKEN, 1, b"body", PROPERTIES[0])
    left, (message,) = sifted([header, body, deliver, body, header, body])
    assert (left, message.body) == (header + body + body, b"body")


def test_two_channels_may_deliver_in_between_each_other() -> None:
    sieve, first, second = Sieve(), list[Message](), list[Message]()
    sieve.attach(1, Deliveries(first.append))
    sieve.attach(2, Deliveries(second.append))
    one, two = frames_of(1, 1, b"one", PROPERTIES[1]), frames_of(2, 2, b"two", PROPERTIES[1])
    assert sieve.sift(one[0] + two[0] + one[1] + two[1] + two[2] + one[2]) == b""
    assert [m.body for m in (*first, *second)] == [b"one", b"two"]


def test_of_a_message_that_is_too_large_for_a_hint_only_the_beginning_is_kept() -> None:
    """Anybody who can write to the queue may send 128 MB, in a thousand frames."""
    body = bytes(16 * MAX_BYTES)
    first, second = frames_of(TAKEN, 1, body, PROPERTIES[1], parts=16), frames_of(TAKEN, 2, b"hint", PROPERTIES[1])
    left, (large, hint) = sifted([*first, *second])
    assert left == b""
    assert (large.tag, large.size, hint.body) == (1, len(body), b"hint")
    assert MAX_BYTES < len(large.body) <= 2 * MAX_BYTES
    with pytest.raises(Garbage, match="oversized"):
        decode(large.body)


def test_headers_that_nobody_can_read_are_none_and_the_message_comes_all_the_same() -> None:
    """Read by the client they would end the connection, and the message would come again and end the next one."""
    deliver, header, body = frames_of(TAKEN, 1, b"body", spec.Basic.Properties(headers={"a": "b"}))
    at = header.index(b"\x01aS") + 2
    left, (message,) = sifted([deliver, header[:at] + b"?" + header[at + 1 :], body])
    assert (left, message.body, message.headers) == (b"", b"body", {})


def nested(levels: int) -> bytes:
    """A header table, encoded, in which tables lie in each other."""
    table = b""
    for _ in range(levels):
        table = b"\x01aF" + struct.pack(">I", len(table)) + table
    return struct.pack(">I", len(table)) + table


@pytest.mark.parametrize("levels", [900, 20_000])
def test_headers_that_are_nested_too_deep_are_none(levels: int) -> None:
    """The decoder recurses. The client would end the connection, and the message would come again."""
    deliver, _, body = frames_of(TAKEN, 1, b"body", PROPERTIES[0])
    header = frame(HEADER, TAKEN, CONTENT.pack(60, 0, 4, 1 << 13) + nested(levels))
    left, (message,) = sifted([deliver, header, body])
    assert (left, message.body, message.headers) == (b"", b"body", {})


@pytest.mark.parametrize(
    "broken", [b"\x01\x00\x03\x00\x00\x00\x01XX", b"\x01\x00\x03\xff\xff\xff\xffX", b"AMQP\x00\x00\x09\x01"]
)
def test_what_is_no_frame_is_left_to_the_client_with_all_that_follows(broken: bytes) -> None:
    good = b"".join(frames_of(TAKEN, 1, b"body", PROPERTIES[0]))
    left, messages = sifted([good + broken, good])
    assert left == broken + good
    assert len(messages) == 1


def test_a_channel_that_was_left_and_one_whose_number_is_anothers_now() -> None:
    sieve, mine, theirs = Sieve(), list[Message](), list[Message]()
    take_mine, take_theirs = Deliveries(mine.append), Deliveries(theirs.append)
    frames = b"".join(frames_of(TAKEN, 1, b"body", PROPERTIES[0]))
    sieve.attach(TAKEN, take_mine)
    sieve.detach(TAKEN, take_mine)
    assert sieve.sift(frames) == frames
    sieve.attach(TAKEN, take_theirs)
    sieve.detach(TAKEN, take_mine)
    assert sieve.sift(frames) == b""
    assert (len(mine), len(theirs)) == (0, 1)


def test_an_ack_is_what_the_client_would_have_written() -> None:
    for multiple in (False, True):
        _, channel, frame = unmarshal(ack(7, 2**40, multiple=multiple))
        assert channel == 7
        assert isinstance(frame, spec.Basic.Ack)
        assert (frame.delivery_tag, frame.multiple) == (2**40, multiple)


async def test_the_client_hears_that_a_connection_lives_on_which_only_deliveries_come() -> None:
    """RabbitMQ sends no heartbeats while it sends anything else; the client would give the connection up."""
    now = 0.0
    sieve = Sieve()
    sieve.attach(TAKEN, Deliveries(lambda _message: None))
    reader = _Reader(sieve, asyncio.get_running_loop())
    reader._clock, reader._client_fed_at = lambda: now, 0.0
    frames = b"".join(frames_of(TAKEN, 1, b"body", PROPERTIES[0]))
    for now in (0.5, 0.9, 1.5, 1.9, 2.6):  # noqa: B007 - the clock reads it
        reader.feed_data(frames)
    reader.feed_eof()
    assert await reader.read() == marshal(Heartbeat(), 0) * 2


async def test_the_client_gets_no_made_up_heartbeat_before_a_handler_gets_frames() -> None:
    """Half of the broker's first frame came late: the client expects that frame first, and refuses any other."""
    now = 0.0
    reader = _Reader(Sieve(), asyncio.get_running_loop())
    reader._clock, reader._client_fed_at = lambda: now, 0.0
    start = frame(METHOD, 0, b"start")
    now = 30.0
    reader.feed_data(start[:5])
    reader.feed_data(start[5:])
    reader.feed_eof()
    assert await reader.read() == start


class _Closed(asyncio.Transport):
    def is_closing(self) -> bool:
        return True


async def test_the_silence_of_a_connection_counts_from_its_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS handshake may take seconds: they are no silence of the broker."""
    loop, now, while_connecting = asyncio.get_running_loop(), 100.0, []
    wire = Wire()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def connect(make_protocol: Any, *_arguments: object, **_named: object) -> Any:
        nonlocal now
        now += 9.0
        while_connecting.append(wire.silence)
        return _Closed(), make_protocol()

    contexts = SimpleNamespace(get_context=None)
    monkeypatch.setattr(loop, "create_connection", connect)
    await wire.create(URL("amqp://127.0.0.1:5672/"), ssl_context_provider=contexts)
    assert (while_connecting, wire.silence) == ([0.0], 0.0)
    now += 3.0
    assert wire.silence == 3.0
