"""What a handler raises reaches PostgreSQL in a form that it can store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from leasehold import DeclarationError, Retry, TaskFailed
from leasehold.domain.errors import Permanent
from leasehold.domain.storable import storable_text
from leasehold.workflows.driver import _reported


def test_a_text_is_stored_without_what_postgresql_refuses() -> None:
    assert storable_text("a\x00b\udcffc\u2028") == "ab?c\u2028"


@pytest.mark.parametrize(
    "error", [ValueError("\x00\udcff"), Permanent("\x00\udcff", "\x00"), TaskFailed("\udcff", "x")]
)
def test_an_error_of_a_call_is_stored_in_the_journal(error: Exception) -> None:
    for text in _reported(error):
        assert text == storable_text(text)


def test_a_retry_whose_delays_have_no_end_is_refused() -> None:
    endless: list[dict[str, Any]] = [{"longest": timedelta.max}, {"delay": timedelta.max, "longest": timedelta.max}]
    for terms in endless:
        with pytest.raises(DeclarationError, match="at most 36500 days"):
            Retry(**terms)
