"""How the console's pages write values for people."""

from __future__ import annotations

import pytest

from leasehold.api.console.rendering import lasting, span


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (119, "1 min"), (3599, "59 min"),
        (3600, "1 h"), (3659, "1 h"), (3660, "1 h 1 min"), (86_399, "23 h 59 min"),
        (86_400, "1 d"), (89_999, "1 d"), (90_000, "1 d 1 h"), (40 * 86_400 + 7200, "40 d 2 h"),
    ],
)  # fmt: skip
def test_a_length_of_time_has_its_two_largest_units_from_an_hour_on(seconds: float | None, words: str) -> None:
    assert span(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(None, ""), (0.0125, "12 ms"), (1, "1.0 s"), (59.94, "59.9 s"), (60, "1 min")]
)
def test_a_short_length_of_time_has_milliseconds_or_tenths_of_seconds(seconds: float | None, words: str) -> None:
    assert lasting(seconds) == words
