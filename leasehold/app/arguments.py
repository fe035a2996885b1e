"""Converts the arguments of a task's function to JSON and back, by a pydantic model.

If the type of a function's only parameter is a pydantic model whose JSON is an object, this module uses that model. For
any other function, it makes a model of the function's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, SchemaError

from leasehold.app.source_location import declaration_error
from leasehold.domain.errors import InvalidArguments
from leasehold.domain.json_pointer import first_mismatch_of
from leasehold.domain.params import json_of_params
from leasehold.domain.storable import NotStorable

#: The kinds of parameters that take positional arguments.
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
#: The kinds of parameters that a task must not have, and the signs by which Python code writes them.
_VARIADIC = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


class Arguments:
    """Converts the arguments of a function to JSON where a call is submitted, and back where the function runs.

    `model`: the pydantic model of the JSON. `skip`: the number of leading parameters that the worker fills in (a
    workflow's `ctx`).
    """

    def __init__(self, function: Callable[..., Any], hints: Mapping[str, Any], *, skip: int = 0) -> None:
        """`hints`: the function's annotations, evaluated. Raises DeclarationError."""
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[skip:]
        self._signature = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        for parameter in parameters:
            if parameter.kind in _VARIADIC:
                sign = _VARIADIC[parameter.kind]
                raise declaration_error(function, f"{sign}{parameter.name}: a task takes named parameters only")
            if parameter.name not in hints:
                raise declaration_error(
                    function, f"parameter {parameter.name!r} has no type: a worker checks the JSON against the type"
                )
        self._model_parameter: str | None = None  # the name of the only parameter, if its type is used as the model
        only_type = hints[parameters[0].name] if len(parameters) == 1 else None
        try:
            if isinstance(only_type, type) and issubclass(only_type, BaseModel) and _is_object(only_type):
                self._model_parameter = parameters[0].name
                self.model: type[BaseModel] = only_type
            else:
                self.model = _model_of(function, parameters, hints)
            self.model.model_json_schema()  # raises for a type without JSON; clients also read the schema
        except (PydanticUserError, SchemaError, TypeError, ValueError) as error:
            raise declaration_error(function, f"its parameters cannot be converted to JSON: {error}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(self._signature.parameters)

    def encoded(self, positional: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as JSON. Raises InvalidArguments with the path of the value that does not fit."""
        values = self._bind(positional, named)
        try:
            return json_of_params(self.model, self.model.model_validate(values))
        except ValidationError as error:
            raise InvalidArguments(*first_mismatch_of(error)) from None
        except NotStorable as error:
            raise InvalidArguments(error.path, error.reason) from None
        except (PydanticSerializationError, ValueError) as error:  # pydantic raises a ValueError for a circular list
            raise InvalidArguments("", str(error)) from None

    def _bind(self, positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """The values of `model`'s fields, or the instance of `model` that the caller gave. Raises InvalidArguments."""
        try:
            call = self._signature.bind(*positional, **named)
        except TypeError as error:
            raise InvalidArguments("", f"{error}") from None
        if self._model_parameter is None:
            return call.arguments
        call.apply_defaults()  # `f(x: M = M(a=3))` called without arguments gets a=3, not the default of M.a
        return call.arguments[self._model_parameter]

    def decoded(self, params: BaseModel) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the named arguments for a call of the function. `params`: the checked instance of `model`.
        Only positional-only parameters get their arguments by position.
        """
        if self._model_parameter is not None:
            values: dict[str, Any] = {self._model_parameter: params}
        else:
            values = {name: getattr(params, _field_name(name)) for name in self.names}
        positional = [p.name for p in self._signature.parameters.values() if p.kind is p.POSITIONAL_ONLY]
        return tuple(values.pop(name) for name in positional), values


def takes_positional(function: Callable[..., Any], *, skip: int = 0) -> bool:
    """Whether the function can get a positional argument after its first `skip` arguments."""
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return any(parameter.kind in POSITIONAL for parameter in parameters)


def hints_of(function: Callable[..., Any], local_names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The annotations of the function, evaluated. `local_names`: the local names at the place where the function is
    declared, because an annotation may name a local class. Raises DeclarationError for a name that is not defined yet,
    and for an annotation that is not a type.
    """
    try:
        return get_type_hints(inspect.unwrap(function), localns=dict(local_names or {}), include_extras=True)
    except NameError as error:
        raise declaration_error(
            function, f"an annotation names {error.name!r}, which is not defined above it"
        ) from error
    except Exception as error:  # an annotation is an expression, and may raise anything
        raise declaration_error(function, f"an annotation is not a type: {error}") from error


def _is_object(model: type[BaseModel]) -> bool:
    """Whether the model's JSON is an object. The JSON of a RootModel may be anything."""
    if not issubclass(model, RootModel):
        return True
    schema = model.model_json_schema()
    return _is_object_schema(schema, schema.get("$defs", {}))


def _is_object_schema(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> bool:
    if "$ref" in schema:
        return _is_object_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if options := schema.get("anyOf", schema.get("oneOf")):
        return all(_is_object_schema(option, definitions) for option in options)
    return schema.get("type") == "object"


def _field_name(name: str) -> str:
    """The model's attribute for a parameter. The prefix is needed because a parameter may have the same name as an
    attribute that every pydantic model has.
    """
    return f"p_{name}"


def _model_of(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for parameter in parameters:
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        fields[_field_name(parameter.name)] = (hints[parameter.name], Field(default, alias=parameter.name))
    return create_model(
        f"{function.__name__}_arguments",
        __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False),
        __module__=function.__module__,
        **fields,
    )
