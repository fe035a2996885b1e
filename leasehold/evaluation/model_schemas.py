"""Compiles the JSON Schemas of pydantic models. Code declares such models for its templates and for signals.

The model itself checks each value that fits its schema. So the schema must not refuse a value that the model accepts.
Pydantic accepts more than the formats of JSON Schema allow, for example a time without a zone, a duration of 1.5 s, a
UUID without hyphens, and a URL or an email address with letters beyond ASCII. Pydantic also writes some of these forms,
so `_FORMATS` allows them. The validator matches patterns with an engine that takes linear time. This engine does not
know some expressions of Python's patterns, so `_with_known_patterns` leaves out the patterns that it cannot compile.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date
from typing import Any
from uuid import UUID

from jsonschema_rs import Draft202012Validator, ReferencingError, ValidationError
from pydantic import AnyUrl, TypeAdapter
from pydantic import ValidationError as NotOfType

from leasehold.evaluation.flat import compile_schema

#: _NAMED: the keywords whose values map names to subschemas. _VALUES: the keywords whose values contain no schemas.
_NAMED = ("properties", "patternProperties", "$defs", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "required")


def compile_model_schema(schema: Any) -> Draft202012Validator:
    """The validator for the schema of a model. Raises the errors of `compile_schema`."""
    return compile_schema(_with_known_patterns(schema), _FORMATS)


def _reads(kind: Any) -> Callable[[str], bool]:
    # Returns the check whether pydantic accepts a text as a value of the type `kind`.
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def fits(text: str) -> bool:
        try:
            adapter.validate_python(text)
        except NotOfType:
            return False
        return True

    return fits


def _reads_any(_text: str) -> bool:
    return True


#: ISO 8601 as pydantic writes and reads it: `-P1D`, `P1Y35DT0.5S`.
_DURATION = re.compile(
    r"[+-]?P(?=.)(\d+Y)?(\d+M)?(\d+W)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?",
    re.ASCII,
)
#: The checks of these two formats by the rules of JSON Schema.
_DATE_TIME, _TIME = (compile_schema({"format": name}) for name in ("date-time", "time"))
#: Format -> whether a text has this format, as pydantic writes and reads it. Pydantic also reads a number as a time,
#: but these checks refuse it, as JSON Schema does. The model alone checks emails and patterns.
_FORMATS: dict[str, Callable[[str], bool]] = {
    "date-time": lambda text: _DATE_TIME.is_valid(text) or _DATE_TIME.is_valid(f"{text}Z"),
    "date": _reads(date),
    "time": lambda text: _TIME.is_valid(text) or _TIME.is_valid(f"{text}Z"),
    "duration": lambda text: _DURATION.fullmatch(text) is not None,
    "uuid": _reads(UUID),
    "uri": _reads(AnyUrl),
    "email": _reads_any,
    "regex": _reads_any,
}


def _with_known_patterns(schema: Any) -> Any:
    """The schema without the patterns that the engine cannot compile. If such a pattern is in `patternProperties`, the
    subschemas there become `additionalProperties`.
    """
    if isinstance(schema, list):
        return [_with_known_patterns(subschema) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "patternProperties" and isinstance(value, dict) and not all(map(_is_known, value)):
            # These are patterns for the keys of a dict. Pydantic writes one pattern, for all keys, so its subschema
            # holds for all values of the dict.
            kept["additionalProperties"] = {"anyOf": [_with_known_patterns(subschema) for subschema in value.values()]}
        elif keyword in _NAMED and isinstance(value, dict):
            kept[keyword] = {name: _with_known_patterns(subschema) for name, subschema in value.items()}
        elif keyword in _VALUES:
            kept[keyword] = value
        elif keyword != "pattern" or _is_known(value):
            kept[keyword] = _with_known_patterns(value)
    return kept


def _is_known(pattern: Any) -> bool:
    try:
        compile_schema({"pattern": pattern})
    except (ValidationError, ReferencingError, ValueError):
        return False
    return True
