"""What a client reads of a refusal: which values are wrong, and whether to come back later."""

from __future__ import annotations

import asyncpg
import pytest
from fastapi.exceptions import RequestValidationError

from leasehold.api.http.problems import problem_of


@pytest.mark.parametrize(
    ("key", "pointer"),
    [
        ("name", "#/name"),
        ("a/b~c", "#/a~1b~0c"),
        ("ü b%", "#/%C3%BC%20b%25"),
        ("x" * 9999, "#/" + "x" * 299 + "%E2%80%A6"),
    ],
    ids=["plain", "escaped", "percent-encoded", "cut"],
)
def test_a_wrong_value_is_named_by_a_pointer_that_a_uri_may_end_with(key: str, pointer: str) -> None:
    error = RequestValidationError([{"loc": ("body", key), "msg": "no", "type": "x"}])
    assert problem_of(error).errors == [{"pointer": pointer, "detail": "no"}]


def test_of_very_many_wrong_values_the_first_are_named() -> None:
    wrong = [{"loc": ("body", n), "msg": "no", "type": "x"} for n in range(100_000)]
    refused = problem_of(RequestValidationError(wrong))
    assert [error["pointer"] for error in refused.errors] == [f"#/{n}" for n in range(100)]
    assert "names the first 100" in refused.detail


def test_a_value_that_no_repetition_could_encode_is_our_error_and_no_outage() -> None:
    class Unencodable(asyncpg.InterfaceError, ValueError): ...

    refused = problem_of(Unencodable("invalid input for query argument $1"))
    assert (refused.status, refused.code) == (500, "internal_error")
    away = problem_of(asyncpg.InterfaceError("connection is closed"))
    assert (away.status, away.code) == (503, "database_unavailable")
