"""What callers get of errors: they survive a process pool, and they tell what to do."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import NoReturn
from uuid import UUID

import httpx2
import pytest

from leasehold.client.calls import Call
from leasehold.client.errors import ApiError, RunFailed, Unavailable
from leasehold.client.retrying import Tries
from leasehold.domain.errors import (
    BadSetting,
    LeaseholdError,
    Permanent,
    Retryable,
    SchemaLocked,
    TaskFailed,
    TooMany,
    Unanswered,
    Unreachable,
)

_ERRORS = [
    ApiError(422, {"code": "x", "detail": "d", "errors": [{"pointer": "#/a"}], "request_id": "r"}, "k"),
    Unavailable("http://a", 3, "reset", "k"),
    RunFailed("id", "failed", "c", "m"),
    BadSetting("LEASEHOLD_X", "must be positive"),
    TooMany("rate_limited", "m", policy="p", at_most=3, retry_after=2.5, window=60),
    Unanswered([UUID(int=1)], 3),
    Unreachable(UUID(int=1), "r"),
    SchemaLocked(3, ["a"]),
    TaskFailed("c", "m"),
    Retryable("m", code="c", after=timedelta(seconds=3)),
    Permanent("c", "m"),
]


@pytest.mark.parametrize("error", _ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_it_was_pickled(error: LeaseholdError) -> None:
    error.add_note("note")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), str(copy), copy.args, vars(copy)) == (type(error), str(error), error.args, vars(error))


@pytest.mark.parametrize("problem", [{"code": None, "errors": 5}, {"errors": "no list"}, {"errors": {"a": 1}}, {}])
def test_a_problem_of_something_between_is_an_api_error_too(problem: dict[str, object]) -> None:
    error = ApiError(500, problem)
    assert (error.code, error.errors) == ("http_500", [])


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            Call("POST", "/x", str),
            httpx2.ReadError("reset"),
            "http://a did not answer: reset. The request may have been done: check before you send it again.",
        ),
        (Call("POST", "/x", str), httpx2.ConnectError("refused"), "http://a has not answered for 0 s: refused."),
        (
            Call("GET", "/x", str, idempotent=True),
            httpx2.ReadError("reset"),
            "http://a has not answered for 0 s: reset.",
        ),
        (
            Call("GET", "/x", str, idempotent=True),
            httpx2.RemoteProtocolError("Server disconnected without sending a response."),
            "http://a has not answered for 0 s: Server disconnected without sending a response.",
        ),
        (
            Call("POST", "/x", str, keyed=True, key="k"),
            httpx2.ReadError("reset"),
            "http://a has not answered for 0 s: reset. Try again with key='k'.",
        ),
    ],
)
def test_the_error_tells_whether_the_request_may_be_repeated(
    call: Call[str], error: httpx2.TransportError, sentence: str
) -> None:
    with pytest.raises(Unavailable) as raised:
        Tries(call, "http://a", 0.0).after_error(error)
    assert str(raised.value) == sentence


def test_a_client_that_tries_for_hours_keeps_to_its_longest_pause() -> None:
    tries = Tries(Call("GET", "/x", str, idempotent=True), "http://a", 1e9)
    pauses = [tries.after_error(httpx2.ReadError("reset")) for _ in range(1100)]
    assert 0.1 <= pauses[0] <= 0.2
    assert all(5.0 <= pause <= 10.0 for pause in pauses[6:])


class _Odd(Exception):
    """As an exception of a library that no other process can load."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("it stays here")


def test_a_failure_that_a_handler_makes_of_another_exception_passes_between_processes() -> None:
    error = Permanent("bad_input", _Odd("it is broken"))  # type: ignore[arg-type]  # as handlers do
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - of this test
    assert (type(again), again.code, again.message, str(again)) == (
        Permanent, "bad_input", "it is broken", "it is broken",
    )  # fmt: skip
