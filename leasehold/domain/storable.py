"""JSON that PostgreSQL stores, and that every reader reads as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson


class NotStorable(ValueError):
    """`path`: JSON pointer to the value that cannot be stored. `reason`: why, in words."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path or 'the value'}: {reason}")
        self.path = path
        self.reason = reason


def storable(value: Any) -> bytes:
    """The JSON of `value`, which is made of lists, dicts and JSON's scalars. Raises NotStorable for a text with a NUL
    character, which PostgreSQL refuses, and for an integer beyond 64 bits, which readers would round.
    """
    try:
        encoded = orjson.dumps(value)
    except TypeError as error:
        raise next(_unstorable("", value), NotStorable("", str(error))) from None
    if b"\\u0000" in encoded:
        for problem in _unstorable("", value):
            raise problem
    return encoded


def _unstorable(path: str, value: Any) -> Iterator[NotStorable]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _unstorable(f"{path}/{name}", name)
            yield from _unstorable(f"{path}/{name}", inner)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _unstorable(f"{path}/{number}", inner)
    elif isinstance(value, str) and "\x00" in value:
        yield NotStorable(path, "a text with a NUL character cannot be stored")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield NotStorable(path, "an integer has at most 64 bits")
