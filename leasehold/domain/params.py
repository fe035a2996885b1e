"""Converts the parameters of a run to JSON, and reads them from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from leasehold.domain.sentences import with_article
from leasehold.domain.storable import NotStorable, encode_storable

Model = TypeVar("Model", bound=BaseModel)


def params_of_json(model: type[Model], params: Mapping[str, Any]) -> Model:
    """The parameters as an instance of the model. `params`: JSON, as Python's dicts and lists.

    The parameters go through JSON text, so that pydantic validates them as JSON. Otherwise a strict model would refuse
    the text of a time, of an id or of an enum.

    Raises pydantic's ValidationError.
    """
    return model.model_validate_json(orjson.dumps(params))


def json_of_params(model: type[BaseModel], params: BaseModel) -> dict[str, Any]:
    """The parameters as JSON that a worker can read by `params_of_json(model, ...)`. This function checks that the
    model reads the JSON, for two reasons. Some models write JSON that they themselves refuse to read. And pydantic does
    not check fields that a program assigns later.

    Raises ValidationError if the model refuses its own JSON, and NotStorable if JSON or PostgreSQL cannot hold a value.
    Raises PydanticSerializationError and ValueError if the parameters have no JSON form.
    """
    encoded: Any = params.model_dump(mode="json", by_alias=True, warnings=False)
    model.model_validate_json(encode_storable(encoded))
    if not isinstance(encoded, dict):  # the model may have a serialiser of its own
        kind = with_article(type(encoded).__name__)
        raise NotStorable("", f"the JSON of {model.__name__} is {kind}, not an object")
    return encoded
