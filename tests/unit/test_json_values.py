"""JSON that is stored is read as it was written; a pointer leads back to the value that it names."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from leasehold.domain.json_pointer import path_of, pointer_to
from leasehold.domain.storable import NotStorable, encode_storable


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"loss": nan}, "/loss"),
        ({"losses": [1.0, None, {"last": -inf}]}, "/losses/2/last"),
        (inf, ""),
        ({"a/b": {"c~d": "\x00"}}, "/a~1b/c~0d"),
        ({"big": [2**64]}, "/big/0"),
    ],
)
def test_what_a_reader_would_read_otherwise_is_refused_with_its_place(value: Any, path: str) -> None:
    with pytest.raises(NotStorable) as refused:
        encode_storable(value)
    assert refused.value.path == path


def test_nulls_and_texts_that_only_look_odd_are_stored() -> None:
    assert encode_storable({"none": None, "text": "null \\u0000", "number": 1.5}) == (
        b'{"none":null,"text":"null \\\\u0000","number":1.5}'
    )


@pytest.mark.parametrize("path", [[], ["a"], ["a/b", "c~d", "~1", "0"], ["", "x"]])
def test_a_pointer_names_the_path_that_it_was_made_of(path: list[str]) -> None:
    assert path_of(pointer_to(path)) == path


def test_a_pointer_in_a_sentence_is_cut() -> None:
    assert len(pointer_to(["k" * 100_000])) < 400
