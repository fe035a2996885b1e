"""Compiles flat schemas. The process that checks payloads (the parent of the evaluator's children) evaluates a flat
schema itself, without a child process.

A flat schema is small, and has no reference, no combination of schemas (such as `anyOf`) and no pattern. So its
evaluation visits every value of the payload exactly once, and compares each with at most `weight` values of the schema.
The work is at most payload bytes times weight. If this product is more than `_MAX_STEPS`, or if the schema is not flat,
the evaluator asks a child.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import orjson
from jsonschema_rs import Draft202012Validator, ReferencingError, RegexOptions, ValidationError

from leasehold.evaluation.cost import value_count

#: The most bytes of a schema, and the most steps (payload bytes times weight). Within these bounds an evaluation takes
#: the event loop about a millisecond.
_MAX_SCHEMA_BYTES = 4096
_MAX_STEPS = 200_000
#: The most compiled schemas in the cache.
_MAX_VALIDATORS = 256

#: The keywords that a flat schema may have.
_KEYWORDS: Final = frozenset(
    {
        "type", "enum", "const", "required", "properties", "additionalProperties", "items",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
        "$schema", "$comment", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
    }
)  # fmt: skip


def weight(schema: Any) -> int | None:
    """The most values of the schema with which one payload value is compared, or None if the schema is not flat."""
    if isinstance(schema, bool):
        return 1
    if not isinstance(schema, dict) or not schema.keys() <= _KEYWORDS:
        return None
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return None
    own_weight = len(schema) + len(properties)
    own_weight += sum(value_count(schema[keyword]) for keyword in ("enum", "const", "required") if keyword in schema)
    subschemas = [weight(subschema) for subschema in properties.values()]
    subschemas += [weight(schema[keyword]) for keyword in ("additionalProperties", "items") if keyword in schema]
    # A value of the payload is compared with only one of these schemas, so the heaviest of them counts.
    heaviest = own_weight
    for subschema_weight in subschemas:
        if subschema_weight is None:
            return None
        heaviest = max(heaviest, subschema_weight)
    return heaviest


class FlatSchemas:
    """A cache of recent schemas. It has the validator of each flat schema, and remembers which schemas are not flat."""

    def __init__(self) -> None:
        # {schema: (weight, validator)}; None: the schema is not flat.
        self._validators: OrderedDict[bytes, tuple[int, Draft202012Validator] | None] = OrderedDict()

    def validator(self, schema: bytes, payload_bytes: int) -> Draft202012Validator | None:
        """The schema's validator, if the parent may check a payload of this size. Returns None if a child must check
        it.
        """
        if len(schema) > _MAX_SCHEMA_BYTES:
            return None
        if schema in self._validators:
            self._validators.move_to_end(schema)
        else:
            self._validators[schema] = _compile_flat(orjson.loads(schema))
            if len(self._validators) > _MAX_VALIDATORS:
                self._validators.popitem(last=False)
        flat_schema = self._validators[schema]
        if flat_schema is None:
            return None
        heaviest, validator = flat_schema
        return validator if heaviest * payload_bytes <= _MAX_STEPS else None


def _compile_flat(schema: Any) -> tuple[int, Draft202012Validator] | None:
    """The weight and the validator of a flat schema. Returns None if the schema is not flat, or not a JSON Schema."""
    heaviest = weight(schema)
    if heaviest is None:
        return None
    try:
        return heaviest, compile_schema(schema)
    except (ValidationError, ReferencingError, ValueError):  # not a JSON Schema: the evaluator reports the reason
        return None


def compile_schema(schema: Any, formats: dict[str, Callable[[str], bool]] | None = None) -> Draft202012Validator:
    """A validator that sends no requests, and whose patterns take linear time. `formats`: the name of a format -> the
    check that replaces JSON Schema's own check of the format. Raises ValidationError, ReferencingError or ValueError.
    """
    linear_time = RegexOptions()  # the engine that does not backtrack
    return Draft202012Validator(
        schema, validate_formats=True, formats=formats, pattern_options=linear_time, offline=True
    )
