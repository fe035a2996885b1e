"""The keys with which a cell asks the others: what is wrong with them is said, and no key is shown."""

from __future__ import annotations

import pytest

from leasehold.security.other_cells import parse_keys

KEY = "lh_b_0123456789abcdef_0123456789abcdef0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'{{"{KEY}": "b"}}', "a name that no cell can have"),
        ('{"b": "secret-of-another-form"}', "the key of cell b does not have the form of a key"),
        (f'["{KEY}"]', "not a JSON object"),
        (KEY, "not JSON"),
    ],
)
def test_an_error_in_the_keys_shows_none_of_them(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        parse_keys(text)
    assert "lh_b" not in str(refused.value)
    assert "secret" not in str(refused.value)
