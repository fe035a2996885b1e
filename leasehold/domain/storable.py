"""Encodes JSON, and refuses values that PostgreSQL cannot store or that a reader would read differently."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from math import isfinite
from typing import Any

import orjson

from leasehold.domain.json_pointer import pointer_to

#: A reason of NotStorable. `path_to_non_finite` looks for this reason.
_NOT_FINITE = "JSON has neither NaN nor infinity"


class NotStorable(ValueError):
    """A value cannot be stored. `path`: the JSON pointer to the value. `reason`: why it cannot be stored."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path or 'the value'}: {reason}")
        self.path = path
        self.reason = reason


def encode_storable(value: Any) -> bytes:
    """The JSON of `value`, which is made of lists, dicts and JSON's scalars.

    Raises NotStorable for three kinds of values. PostgreSQL refuses a text with a NUL character. Readers would round an
    integer beyond 64 bits. NaN and infinity do not exist in JSON, so readers would get null.
    """
    try:
        encoded = orjson.dumps(value)
    except TypeError as error:
        raise _first_problem(value) or NotStorable("", str(error)) from None
    # The search in the bytes is fast, but also finds harmless values, such as a text with the word null.
    if b"\\u0000" in encoded or (b"null" in encoded and not _is_finite(value)):
        problem = _first_problem(value)
        if problem is not None:
            raise problem
    return encoded


def as_stored(value: Any) -> Any:
    """The value that orjson reads after PostgreSQL has stored `value` as jsonb. `value`: a value that orjson has read
    from JSON.

    jsonb orders the names of an object by their length, and then by their bytes. jsonb has only one kind of number. So
    1e16 loses its exponent and becomes an integer, and -0.0 loses its sign.
    """
    if isinstance(value, dict):
        return {name: as_stored(value[name]) for name in sorted(value, key=_place_of_name)}
    if isinstance(value, list):
        return [as_stored(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return orjson.loads(f"{Decimal(orjson.dumps(value + 0.0).decode()):f}")  # -0.0 + 0.0 is 0.0
    return value


def _place_of_name(name: str) -> tuple[int, bytes]:
    encoded = name.encode()
    return len(encoded), encoded


def path_to_non_finite(value: Any) -> str | None:
    """The JSON pointer to a NaN or an infinity in `value`. Returns None if `value` has no such number, or if orjson
    cannot write `value`.
    """
    try:
        has_null = b"null" in orjson.dumps(value, default=str)  # orjson writes null for NaN and infinity
    except TypeError:
        return None
    if not has_null:
        return None
    return next((problem.path for problem in _find_problems((), value) if problem.reason == _NOT_FINITE), None)


def _first_problem(value: Any) -> NotStorable | None:
    return next(_find_problems((), value), None)


def _is_finite(value: Any) -> bool:
    """Whether each number in the value is finite. orjson writes null for a number that is not finite."""
    values = [value]
    while values:
        inner = values.pop()
        if isinstance(inner, dict):
            values.extend(inner.values())
        elif isinstance(inner, list):
            values.extend(inner)
        elif isinstance(inner, float) and not isfinite(inner):
            return False
    return True


def storable_text(text: str) -> str:
    """The text as PostgreSQL can store it: without NUL characters, and without lone surrogates, which have no UTF-8
    form. The text of an error about a file with an odd name may contain both.
    """
    return text.replace("\x00", "").encode(errors="replace").decode()


def _find_problems(path: tuple[object, ...], value: Any) -> Iterator[NotStorable]:
    """An error for each value within `value` that cannot be stored. `path`: the keys and positions down to `value`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _find_problems((*path, name), name)
            yield from _find_problems((*path, name), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _find_problems((*path, number), inner)
    elif isinstance(value, str) and "\x00" in value:
        yield NotStorable(pointer_to(path), "a text with a NUL character cannot be stored")
    elif isinstance(value, float) and not isfinite(value):
        yield NotStorable(pointer_to(path), _NOT_FINITE)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield NotStorable(pointer_to(path), "an integer has at most 64 bits")
