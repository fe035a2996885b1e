"""The digest of a JSON value stands in rows: it stays the same for a value, and differs between values."""

from __future__ import annotations

import hashlib
from itertools import combinations
from typing import Any

import orjson
import pytest

from leasehold.domain.json_digest import json_digest


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (7, "7"), ("x", '"x"'), ([True, 2.5], "[true,2.5]"), ({"b": 1, "a": 2}, '{"a":2,"b":1}'),
        (7.0, "7"), (-0.0, "0"), (1e16, "10000000000000000"), ({"a": [(1.0,)]}, '{"a":[[1]]}'),
        (-(2.0**63), "-9223372036854775808"),
        *((large, orjson.dumps(large).decode()) for large in (2.0**64, -(2.0**64), 1e300)),
    ],
)  # fmt: skip
def test_the_digest_is_that_of_the_shortest_json(value: Any, text: str) -> None:
    assert json_digest(value) == hashlib.sha256(text.encode()).hexdigest()[:40]


def test_different_values_have_different_digests() -> None:
    values: list[Any] = [None, False, True, 0, 1, "1", "", [], [1], {}, {"a": 1}, {"a": None}, 1.5, "true"]
    for one, other in combinations(values, 2):
        assert json_digest(one) != json_digest(other)
