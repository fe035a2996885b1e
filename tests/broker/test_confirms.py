"""Messages that were written at once are confirmed one by one, whatever the broker says of them and in what pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands as spec
from pamqp.body import ContentBody
from pamqp.frame import marshal, unmarshal
from pamqp.header import ContentHeader

from leasehold.broker.amqp.confirms import Confirms, Window, publish_frames
from leasehold.broker.amqp.wire import Sieve
from tests.support.patient import patient

CHANNEL = 3
HEADERS: dict[str, Any] = {"traceparent": "00-ab-cd-01", "request_id": "ä" * 40}


def returned(queue: str, body: bytes) -> bytes:
    method = spec.Basic.Return(reply_code=312, reply_text="NO_ROUTE", exchange="", routing_key=queue)
    header = ContentHeader(0, len(body), spec.Basic.Properties(headers={"a": "b"}))
    content: list[ContentHeader | ContentBody] = [header, *([ContentBody(body)] if body else [])]
    return marshal(method, CHANNEL) + b"".join(marshal(one, CHANNEL) for one in content)


def acked(tag: int, *, multiple: bool = False) -> bytes:
    return marshal(spec.Basic.Ack(tag, multiple), CHANNEL)


class Line:
    """A channel's confirms, and the bytes that reach them."""

    def __init__(self) -> None:
        self.came_back: list[str] = []
        self.confirms = Confirms(self.came_back.append)
        self.sieve = Sieve()
        self.sieve.attach(CHANNEL, self.confirms)

    def sent(self, *bodies: bytes, queue: str = "q") -> Window:
        return self.confirms.sent([(queue, body) for body in bodies])


def test_a_message_is_what_the_client_would_have_written() -> None:
    data = publish_frames(CHANNEL, "leasehold.media.low", HEADERS, b"{}")
    method = spec.Basic.Publish(exchange="", routing_key="leasehold.media.low", mandatory=True)
    properties = spec.Basic.Properties(content_type="application/json", headers={**HEADERS}, delivery_mode=2)
    frames = (method, ContentHeader(0, 2, properties), ContentBody(b"{}"))
    assert data == b"".join(marshal(one, CHANNEL) for one in frames)


def test_a_message_without_headers_has_none() -> None:
    data = publish_frames(CHANNEL, "q", {}, b"x")
    size, _, _ = unmarshal(data)
    _, _, header = unmarshal(data[size:])
    assert isinstance(header, ContentHeader)
    assert header.properties.headers is None


@pytest.mark.parametrize(
    ("queue", "headers", "body"),
    [("q" * 256, {}, b""), ("q", {"k": "v" * 4096}, b""), ("q", {}, b"x" * 4089)],
)
def test_what_has_no_form_is_refused_before_it_is_written(queue: str, headers: dict[str, str], body: bytes) -> None:
    with pytest.raises(ValueError, match=r"encode|large"):
        publish_frames(CHANNEL, queue, headers, body)


def test_a_body_may_fill_the_smallest_frame_that_a_broker_may_ask_for() -> None:
    """Of its 4096 bytes, 8 are the frame's own."""
    assert publish_frames(CHANNEL, "q", {}, b"x" * 4088).endswith(b"x" * 4088 + b"\xce")


@patient
@given(st.data())
async def test_each_is_sure_that_was_acked_and_not_returned_wherever_the_stream_is_cut(data: st.DataObject) -> None:
    """As a broker answers: what comes back does so before its confirm; the rest in any order, some of it together."""
    line = Line()
    count = data.draw(st.integers(1, 8))
    window = line.sent(*(b"%d" % number for number in range(count)))
    back = data.draw(st.sets(st.integers(0, count - 1)))
    refused = data.draw(st.sets(st.integers(0, count - 1)))
    together = 0 if refused else data.draw(st.integers(0, count))
    stream = b"".join(returned("q", b"%d" % number) for number in sorted(back))
    stream += acked(together, multiple=True) if together else b""
    for place in data.draw(st.permutations(range(together, count))):
        stream += marshal(spec.Basic.Nack(place + 1), CHANNEL) if place in refused else acked(place + 1)
    left = marshal(spec.Channel.Close(200, "", 0, 0), CHANNEL)
    stream += left
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert b"".join(line.sieve.sift(piece) for piece in pieces) == left
    assert window.settled.done()
    assert window.confirmed == [place not in back | refused for place in range(count)]
    assert line.came_back == ["q"] * len(back)


async def test_a_window_is_settled_with_its_last_confirm_and_not_before() -> None:
    line = Line()
    first, second = line.sent(b"a", b"b"), line.sent(b"c")
    line.sieve.sift(acked(1) + acked(3))
    assert not first.settled.done()
    assert second.settled.done()
    line.sieve.sift(acked(2))
    assert first.settled.done()
    assert first.confirmed == [True, True]


async def test_what_comes_back_is_told_from_another_message_to_the_same_queue_and_from_its_like_in_another() -> None:
    line = Line()
    here, there = line.sent(b"a", b"b"), line.sent(b"b", queue="other")
    line.sieve.sift(returned("q", b"b") + acked(3, multiple=True))
    assert here.confirmed == [True, False]
    assert there.confirmed == [True]


async def test_a_message_without_a_body_that_comes_back_is_followed_by_its_confirm() -> None:
    line = Line()
    window = line.sent(b"")
    line.sieve.sift(returned("q", b"") + acked(1))
    assert window.confirmed == [False]


async def test_of_two_messages_that_are_alike_each_may_come_back() -> None:
    """Two hints of one task: the tag of neither is in a return."""
    line = Line()
    window = line.sent(b"a", b"a", b"a")
    line.sieve.sift(returned("q", b"a") * 2 + acked(3, multiple=True))
    assert (window.confirmed, line.came_back) == ([False, False, True], ["q", "q"])


async def test_one_refusal_marks_a_window_whatever_comes_after_it_and_confirms_do_not() -> None:
    line = Line()
    confirmed, refused = line.sent(b"a", b"b"), line.sent(b"c", b"d")
    line.sieve.sift(acked(1) + acked(2) + marshal(spec.Basic.Nack(3), CHANNEL) + acked(4))
    assert (confirmed.has_refusals, refused.has_refusals) == (False, True)
    assert refused.confirmed == [False, True]


async def test_a_closed_channel_ends_every_wait_and_what_was_not_confirmed_is_not_sure() -> None:
    line = Line()
    window = line.sent(b"a", b"b")
    line.sieve.sift(acked(1))
    line.confirms.abandon()
    assert window.settled.done()
    assert window.confirmed == [True, False]


async def test_confirms_of_what_was_never_sent_or_given_up_are_no_trouble() -> None:
    line = Line()
    window = line.sent(b"a")
    window.complete()
    line.sieve.sift(acked(7) + acked(1) + acked(1))
    assert window.confirmed == [True]
