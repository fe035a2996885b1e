"""The message on the wire is read strictly: it is ours, or it is named garbage."""

from __future__ import annotations

from uuid import uuid4

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.broker import Hint
from leasehold.broker.envelope import MAX_TENANT, Garbage, decode, encode
from tests.support.patient import patient

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


_NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=50)


@patient
@given(task=st.uuids(), queue=_NAME, band=st.integers(0, 2), tenant=_NAME)
def test_what_was_sent_is_what_is_read(task: object, queue: str, band: int, tenant: str) -> None:
    hint = Hint(task, queue, band, TRACE, tenant)  # type: ignore[arg-type]  # the strategy gives UUIDs
    assert decode(encode(hint), TRACE) == hint


def test_a_hint_of_an_older_release_says_nothing_of_its_tenant() -> None:
    task = uuid4()
    old = orjson.dumps({"v": 1, "task": str(task), "queue": "q", "band": 1})
    assert decode(old) == Hint(task, "q", 1)


def test_a_tenant_s_name_is_cut_where_it_would_make_the_hint_too_large() -> None:
    assert decode(encode(Hint(uuid4(), "q", tenant="\u4e2d" * 5000))).tenant == "\u4e2d" * MAX_TENANT


@patient
@given(body=st.binary(max_size=200))
def test_any_bytes_are_a_hint_or_garbage_and_nothing_else(body: bytes) -> None:
    with pytest.raises(Garbage):
        decode(body)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ([], "wrong_shape"),
        ({}, "wrong_version"),
        ({"v": 1}, "wrong_shape"),
        ({"v": 1, "task": 5, "queue": "q", "band": 1}, "wrong_value"),
        ({"v": 1, "task": str(uuid4()), "queue": "", "band": 1}, "wrong_value"),
        ({"v": 1, "task": str(uuid4()), "queue": "q", "band": 3}, "wrong_value"),
        ({"v": 1, "task": str(uuid4()), "queue": "q", "band": True}, "wrong_value"),
        ({"v": 1, "task": str(uuid4()), "queue": "q", "band": 1, "sql": "drop"}, "wrong_shape"),
        ({"v": 1, "task": str(uuid4()), "queue": "q", "band": 1, "tenant": "t"}, "wrong_shape"),
        ({"v": 2, "task": str(uuid4()), "queue": "q", "band": 1}, "wrong_shape"),
        ({"v": 2, "task": str(uuid4()), "queue": "q", "band": 1, "tenant": 7}, "wrong_value"),
        ({"v": 2, "task": str(uuid4()), "queue": "q", "band": 1, "tenant": "t" * 201}, "wrong_value"),
        ({"v": True, "task": str(uuid4()), "queue": "q", "band": 1}, "wrong_version"),
        ({"v": "2", "task": str(uuid4()), "queue": "q", "band": 1, "tenant": "t"}, "wrong_version"),
        ({"v": 99, "task": str(uuid4()), "queue": "q", "band": 1}, "wrong_version"),
    ],
)
def test_garbage_has_a_kind(message: object, kind: str) -> None:
    with pytest.raises(Garbage) as caught:
        decode(orjson.dumps(message))
    assert caught.value.kind == kind


def test_only_short_text_headers_are_taken_over() -> None:
    hint = Hint(uuid4(), "media")
    foreign = {**TRACE, "x-delivery-count": 3, "x-death": [{"queue": "q"}], "huge": "x" * 5000}
    assert decode(encode(hint), foreign).headers == TRACE


def test_a_flood_of_headers_is_not_taken_over() -> None:
    assert decode(encode(Hint(uuid4(), "media")), {f"h{n}": "x" for n in range(100)}).headers == {}
