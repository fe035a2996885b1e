"""Converts the platform's statements, arguments and rows for other drivers. asyncpg's `$1` becomes the driver's own
placeholder, and JSON is passed as text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any
from uuid import UUID

import orjson

#: Finds a parameter (with the cast `::jsonb` that may follow it), or a character that some drivers need escaped.
_TOKEN = re.compile(r"\$(\d+)(::jsonb(?!\[))?|[:%\\]")
#: The names of all JSON columns in the rows of these statements. Some drivers return them as text.
_JSON_COLUMNS = frozenset({"headers", "limits"})


def _converted(statement: str, placeholder: Callable[[str], str], escapes: Mapping[str, str]) -> str:
    # `placeholder`: makes the driver's placeholder from the number of a parameter. `escapes`: a character -> the text
    # that the driver needs in its place.
    def replacement(token: re.Match[str]) -> str:
        if token[1] is None:
            return escapes.get(token[0], token[0])
        # The function `parameter` passes JSON as text, so PostgreSQL must convert the text to jsonb. The two colons of
        # a cast are escaped for SQLAlchemy.
        colons = escapes.get(":", ":") * 2
        return placeholder(token[1]) + (f"{colons}text{colons}jsonb" if token[2] else "")

    return _TOKEN.sub(replacement, statement)


@cache
def for_asyncpg(statement: str) -> str:
    """The statement for asyncpg. JSON is passed as text, because the connection may lack a JSON codec, or have the
    codec of the user's program.
    """
    return _converted(statement, lambda number: f"${number}", {})


@cache
def for_psycopg(statement: str) -> str:
    """The statement for psycopg, with placeholders such as `%(p1)s`."""
    return _converted(statement, lambda number: f"%(p{number})s", {"%": "%%"})


@cache
def for_sqlalchemy(statement: str) -> str:
    """The statement for `sqlalchemy.text`, with placeholders such as `(:p1)`."""
    return _converted(statement, lambda number: f"(:p{number})", {":": "\\:", "\\": "\\\\"})


def parameter(value: Any) -> Any:
    """The argument in a form that every driver accepts: JSON as text, and an id as the standard library's UUID."""
    if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
        return orjson.dumps(value, default=str).decode()
    if isinstance(value, list):
        return [_plain_value(item) for item in value]
    return _plain_value(value)


def named_parameters(arguments: Iterable[Any]) -> dict[str, Any]:
    """The arguments by the name of their placeholder (`p1`, `p2`, ...), for psycopg and SQLAlchemy."""
    return {f"p{number}": parameter(value) for number, value in enumerate(arguments, 1)}


def row_of(names: Iterable[str], values: Iterable[Any]) -> dict[str, Any]:
    """A row as {column: value}. A JSON column has a Python value, even if the driver returned text."""
    return {name: _python_value(name, value) for name, value in zip(names, values, strict=True)}


def _plain_value(value: Any) -> Any:
    return UUID(int=value.int) if isinstance(value, UUID) else value  # asyncpg returns a subclass of UUID


def _python_value(name: str, value: Any) -> Any:
    if name in _JSON_COLUMNS and isinstance(value, (str, bytes)):
        return orjson.loads(value)
    return bytes(value) if isinstance(value, memoryview) else value
