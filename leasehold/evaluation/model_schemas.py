"""Compiles the JSON Schema of a pydantic model, to check JSON that the model will read.

Pydantic reads more than the formats of JSON Schema allow: a time without a zone, a duration of 1.5 s, a UUID without
hyphens, an address with letters beyond ASCII. What Python's own values are written as is among that.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from typing import Any
from uuid import UUID

from jsonschema_rs import Draft202012Validator, ReferencingError, ValidationError
from pydantic import AnyUrl, TypeAdapter
from pydantic import ValidationError as NotOfType

from leasehold.evaluation.flat import compile_schema


def compile_model_schema(schema: Any) -> Draft202012Validator | None:
    """A validator that refuses only what the model refuses, too. None: the schema has a pattern of Python's own, which
    takes more than linear time. Then only the model can check a value.
    """
    try:
        return compile_schema(schema, _FORMATS)
    except (ValidationError, ReferencingError, ValueError):
        return None


def _reads(kind: Any) -> Callable[[str], bool]:
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


#: Format -> whether pydantic may read a text of this format. An email or a pattern is for the model alone to check.
_FORMATS = {
    "date-time": _reads(datetime),
    "date": _reads(date),
    "time": _reads(time),
    "duration": _reads(timedelta),
    "uuid": _reads(UUID),
    "uri": _reads(AnyUrl),
    "email": _reads_any,
    "regex": _reads_any,
}
