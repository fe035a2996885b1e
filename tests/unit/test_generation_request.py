"""What a generation's request may hold, without a server."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from leasehold.api.generation.schemas import GenerationRequest


@pytest.mark.parametrize("ratio", ["1:1", "16:9", "999:100"])
def test_a_ratio_has_two_numbers(ratio: str) -> None:
    assert GenerationRequest(prompt="p", ratio=ratio).ratio == ratio


@pytest.mark.parametrize("ratio", ["١٦:٩", "16:٩", "16:9\n", "16", ":9", "1000:1", "1.5:1"])
def test_a_ratio_in_other_characters_is_refused(ratio: str) -> None:
    """The pattern of the API's document is of ECMAScript, where a digit is 0 to 9 alone."""
    with pytest.raises(ValidationError):
        GenerationRequest(prompt="p", ratio=ratio)
