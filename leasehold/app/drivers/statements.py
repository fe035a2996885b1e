"""The platform's statements for other drivers: asyncpg's `$1` becomes their placeholder, and JSON becomes text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any
from uuid import UUID

import orjson

#: A parameter, and whether the statement reads it as JSON; or a sign that a driver reads as its own.
_TOKEN = re.compile(r"\$(\d+)(::jsonb(?!\[))?|[:%\\]")
#: Columns of JSON in what these statements return. Some drivers return text for them.
_JSON = frozenset({"headers", "limits"})


def _converted(statement: str, placeholder: Callable[[str], str], escapes: Mapping[str, str]) -> str:
    def replaced(found: re.Match[str]) -> str:
        if found[1] is None:
            return escapes.get(found[0], found[0])
        colons = escapes.get(":", ":") * 2
        return placeholder(found[1]) + (f"{colons}text{colons}jsonb" if found[2] else "")

    return _TOKEN.sub(replaced, statement)


@cache
def of_asyncpg(statement: str) -> str:
    """For a connection without our JSON codec, or with one of the user's."""
    return _converted(statement, lambda number: f"${number}", {})


@cache
def of_psycopg(statement: str) -> str:
    """With `%(p1)s`."""
    return _converted(statement, lambda number: f"%(p{number})s", {"%": "%%"})


@cache
def of_sqlalchemy(statement: str) -> str:
    """With `:p1`, for `sqlalchemy.text`."""
    return _converted(statement, lambda number: f"(:p{number})", {":": "\\:", "\\": "\\\\"})


def parameter(value: Any) -> Any:
    """A value of a statement: JSON as text, and ids of the standard library's type."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return orjson.dumps(value, default=str).decode()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return _plain(value)


def named(arguments: Iterable[Any]) -> dict[str, Any]:
    """The parameters by the names of the placeholders."""
    return {f"p{number}": parameter(value) for number, value in enumerate(arguments, 1)}


def row_of(names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    """A row as the platform reads it: by name, with JSON as Python values whatever the driver makes of it."""
    return {name: _read(name, value) for name, value in zip(names, values, strict=True)}


def _plain(value: Any) -> Any:
    return UUID(int=value.int) if isinstance(value, UUID) else value  # asyncpg has a subclass of its own


def _read(name: str, value: Any) -> Any:
    if name in _JSON and isinstance(value, (str, bytes)):
        return orjson.loads(value)
    return bytes(value) if isinstance(value, memoryview) else value
