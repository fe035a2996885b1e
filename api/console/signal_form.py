"""The form with which a person answers a workflow that waits for a signal. The fields of the form are made from the
JSON Schema of the signal's payload.

If plain fields are not enough for the schema, the form has one field for JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import orjson

from leasehold.api.http.strict_json import refusal
from leasehold.domain.errors import Invalid

Kind: TypeAlias = Literal["text", "number", "integer", "boolean", "choice", "json"]
#: A form has at most this many plain fields. A plain field has at most this many choices.
_MAX_FIELDS, _MAX_CHOICES = 20, 50
#: A type of JSON Schema -> the kind of its field.
_KINDS: dict[str, Kind] = {"string": "text", "number": "number", "integer": "integer", "boolean": "boolean"}


@dataclass(frozen=True, slots=True)
class Input:
    """A field of the form. `name`: the member of the payload for this field; empty: the field is the whole payload.
    `hint`: the explanation beside the field. `null_if_empty`: if the field is empty, its member in the payload is null.
    Without `null_if_empty`, an empty field adds no member. Exception: an empty text or choice that is required adds the
    member "".
    """

    name: str
    label: str
    kind: Kind
    required: bool
    choices: tuple[str, ...] = ()
    hint: str = ""
    null_if_empty: bool = False


def inputs_of(schema: Any) -> list[Input]:
    """The fields for a payload that fits the schema. If `schema` is None (or no object), any payload fits."""
    if not isinstance(schema, dict):
        return [Input("", "Payload (JSON)", "json", required=False)]
    properties = schema.get("properties")
    if schema.get("type") == "object" and isinstance(properties, dict) and len(properties) <= _MAX_FIELDS:
        required = schema.get("required", [])
        # PostgreSQL keeps the order of the array `required`, but not the order of an object's members. So the required
        # fields come first, in their order.
        names = [*(name for name in required if name in properties), *(sorted(properties.keys() - set(required)))]
        inputs = [_input_of(name, properties[name], required=name in required) for name in names]
        if all(inputs):  # each member has a plain field
            return [field for field in inputs if field is not None]
    whole_payload = _input_of("", schema, required=True)
    return [whole_payload or Input("", "Payload (JSON)", "json", required=True, hint=str(schema.get("title", ""))[:80])]


def _input_of(name: str, schema: Any, *, required: bool) -> Input | None:
    """A field for a value of this schema. None: a plain field is not enough for such a value."""
    if not isinstance(schema, dict):
        return None
    title = str(schema.get("title") or name or "Payload")[:80]
    hint = str(schema.get("description", ""))[:200]
    any_of = schema.get("anyOf", [])
    options = [option for option in any_of if option != {"type": "null"}]
    if len(options) == 1:
        is_nullable = len(any_of) > 1  # the value is this option or null, so the field may stay empty
        option_input = _input_of(name, options[0], required=required and not is_nullable)
        return option_input and replace(option_input, label=title, hint=hint, null_if_empty=required and is_nullable)
    choices = schema.get("enum")
    if isinstance(choices, list) and len(choices) <= _MAX_CHOICES and all(isinstance(item, str) for item in choices):
        return Input(name, title, "choice", required, tuple(choices), hint)
    kind = _KINDS.get(schema["type"]) if isinstance(schema.get("type"), str) else None
    return None if kind is None else Input(name, title, kind, required, (), hint)


def payload_of(inputs: list[Input], form: Mapping[str, str], max_depth: int) -> Any:
    """The payload that a person has filled in. This function does not check that the payload fits the schema, because
    the endpoint does so later.

    Raises Invalid if the text in a field for JSON or for a number is not JSON. Also raises Invalid for JSON that the
    API refuses in requests (strict_json.py), for example an integer beyond 64 bits, which a parser would change.
    """
    if [field.name for field in inputs] == [""]:
        return _typed_value(inputs[0], form.get("payload", ""), max_depth)
    values = {field.name: _typed_value(field, form.get(f"payload.{field.name}", ""), max_depth) for field in inputs}
    return {field.name: values[field.name] for field in inputs if values[field.name] is not None or field.null_if_empty}


def _typed_value(field: Input, text: str, max_depth: int) -> Any:
    """The value of the field. None: the field is empty. `max_depth`: how deep the JSON in the field may be nested."""
    if field.kind == "boolean":
        return {"true": True, "false": False}.get(text)
    if field.kind in ("text", "choice"):
        return text if text or field.required else None
    if not text.strip():
        return None
    problem = refusal(text.encode(), max_depth)
    if problem is not None:
        raise Invalid(problem.code, f"{field.label}: {problem.detail}")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        expected = "JSON" if field.kind == "json" else "a number"
        raise Invalid("invalid_payload", f"{field.label}: this is not {expected}.") from None
    return value
