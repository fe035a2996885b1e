"""Reads the parameters of a run from their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def params_of_json(model: type[Model], params: Mapping[str, Any]) -> Model:
    """The parameters as an instance of the model. `params`: JSON, as Python's dicts and lists.

    Pydantic must know that they come from JSON. Else a strict model refuses the text of a time, of an id or of an enum.

    Raises pydantic's ValidationError.
    """
    return model.model_validate_json(orjson.dumps(params))
