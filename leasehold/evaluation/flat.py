"""Schemas that are evaluated where they are met, without a child process, because their cost is bounded by their size.

Such a schema is small and visits every value of the payload exactly once: no reference, no combination, no pattern.
So an evaluation compares each value of the payload with at most `weight` values of the schema, and bytes times weight
is an upper bound. What is above the bound goes to the evaluator, as does every other schema.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

import orjson
from jsonschema_rs import Draft202012Validator, ReferencingError, RegexOptions, ValidationError

#: Schema bytes, and the product of payload bytes and weight, that are evaluated in an event loop: about a millisecond.
_MOST_SCHEMA = 4096
_MOST_STEPS = 200_000
_KEPT = 256

_KEYWORDS: Final = frozenset(
    {
        "type", "enum", "const", "required", "properties", "additionalProperties", "items",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
        "$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    }
)  # fmt: skip


def weight(schema: Any) -> int | None:
    """The most that one value of a payload is compared with; None for a schema that is not flat."""
    if isinstance(schema, bool):
        return 1
    if not isinstance(schema, dict) or not schema.keys() <= _KEYWORDS:
        return None
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return None
    own = len(schema) + len(properties)
    own += sum(_values(schema[keyword]) for keyword in ("enum", "const", "required") if keyword in schema)
    under = [weight(one) for one in properties.values()]
    under += [weight(schema[keyword]) for keyword in ("additionalProperties", "items") if keyword in schema]
    heaviest = own
    for one in under:
        if one is None:
            return None
        heaviest = max(heaviest, one)
    return heaviest


def _values(found: Any) -> int:
    if isinstance(found, dict):
        return 1 + sum(map(_values, found.values()))
    return 1 + sum(map(_values, found)) if isinstance(found, list) else 1


class FlatSchemas:
    """The validators of the flat schemas that were met last; safe to ask for any schema."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, Draft202012Validator] | None] = OrderedDict()

    def validator(self, schema: bytes, payload_bytes: int) -> Draft202012Validator | None:
        """A validator for what may be evaluated here; None for what must not."""
        if len(schema) > _MOST_SCHEMA:
            return None
        if schema in self._known:
            self._known.move_to_end(schema)
        else:
            self._known[schema] = _made(orjson.loads(schema))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        known = self._known[schema]
        if known is None or known[0] * payload_bytes > _MOST_STEPS:
            return None
        return known[1]


def _made(schema: Any) -> tuple[int, Draft202012Validator] | None:
    heaviest = weight(schema)
    if heaviest is None:
        return None
    try:
        return heaviest, compiled(schema)
    except (ValidationError, ReferencingError, ValueError):  # no schema at all: the evaluator says what is wrong
        return None


def compiled(schema: Any) -> Draft202012Validator:
    """Offline, with patterns that take linear time. Raises ValidationError, ReferencingError or ValueError."""
    return Draft202012Validator(schema, validate_formats=True, pattern_options=RegexOptions(), offline=True)
