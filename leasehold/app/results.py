"""Converts the result of a function to JSON and back. PostgreSQL stores a small result, and the object store stores a
large one.

For each step, PostgreSQL stores a value. For a small result, this value is `{"value": JSON}`. For a large result, it is
`{"output": NAME}`, with the name of the output (a file in the object store) that has the JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, SchemaError

from leasehold.app.source_location import declaration_error
from leasehold.domain.errors import ObjectMissing, Permanent, ResultUnreadable
from leasehold.domain.json_pointer import first_mismatch_of
from leasehold.domain.storable import encode_storable

#: The name of the output in which a step stores a large result.
OUTPUT = "result.json"
CONTENT_TYPE = "application/json"  # of this output


class Results:
    """Encodes and decodes the results of one function. Without a return annotation, the result may be any JSON."""

    def __init__(self, function: Callable[..., Any], hints: Mapping[str, Any]) -> None:
        """`hints`: the function's annotations, evaluated. Raises DeclarationError."""
        annotation = hints.get("return", Any)
        self._annotation = annotation
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        except (PydanticUserError, SchemaError, TypeError, ValueError) as error:
            raise declaration_error(function, f"its result cannot be converted to JSON: {error}") from error

    def encoded(self, result: Any) -> bytes:
        """The result as JSON. Raises Permanent `result_not_serialisable`."""
        try:
            return encode_storable(self._adapter.dump_python(result, mode="json", warnings="error", by_alias=True))
        except (PydanticSerializationError, TypeError, ValueError) as error:
            kind = type(result).__name__
            sentence = (
                f"the function returned a value of type {kind}, which is not JSON of {self._annotation!r}: {error}"
            )
            raise Permanent("result_not_serialisable", sentence) from error

    def decoded(self, encoded: bytes | str) -> Any:
        """The result, read from its JSON. Raises ResultUnreadable if the JSON does not fit the type. There are two
        possible reasons. Another release of the code wrote the JSON, or the type cannot read the JSON that it writes
        itself.
        """
        try:
            return self._adapter.validate_json(encoded)
        except ValidationError as error:
            path, reason = first_mismatch_of(error)
            raise ResultUnreadable(f"the result does not fit {self._annotation!r}: {path} {reason}") from error


def inline_value(encoded: bytes) -> dict[str, Any]:
    """The value of a step whose result is small."""
    return {"value": orjson.loads(encoded)}


def stored_value() -> dict[str, Any]:
    """The value of a step whose result is in its output OUTPUT."""
    return {"output": OUTPUT}


def missing_result(run_id: UUID) -> ObjectMissing:
    """The error for a run that has lost its result: the value of its step names the output OUTPUT, but the run has no
    such output.
    """
    return ObjectMissing(f"the run {run_id} has no output {OUTPUT}, which would have its result")
