"""The route class of the endpoints that are called thousands of times a second.

FastAPI's general way to find the arguments of an endpoint takes more time than the endpoint itself. So this class fills
the arguments directly: the request, the caller, a JSON body and headers. The declarations, the OpenAPI document and the
errors are the same as with FastAPI's route class.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from inspect import signature
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from leasehold.api.auth.security import Require, bearer
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.domain.errors import DeclarationError


class QuickRoute(AuthenticatedFirst):
    """The route of an endpoint with these parameters: the request, one model as the body, one Require (which checks the
    API key and returns the caller), and optional headers of text.

    Raises DeclarationError for any other endpoint. The route checks the key before the body, so that a client without a
    valid key learns nothing about the body that it sent.
    """

    def endpoint_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = _Endpoint.read_from(self.dependant)

        async def handle(request: Request) -> Response:
            return await endpoint.call(**await endpoint.arguments(request))

        return handle


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """`call`: the endpoint. `request_name`, `caller_name`, `body_name`: the names of its parameters. `require` makes
    the argument for the caller. `model` makes the argument for the body. `headers`: the name of each parameter for a
    header, and the name of that header.
    """

    call: Callable[..., Awaitable[Response]]
    request_name: str
    caller_name: str
    require: Require
    body_name: str
    model: type[BaseModel]
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def read_from(cls, dependant: Dependant) -> _Endpoint:
        """Read FastAPI's own description of the endpoint. Raises DeclarationError if it has other parameters."""
        match dependant:
            case Dependant(
                call=call,
                request_param_name=str(request_name),
                dependencies=[Dependant(call=Require() as require, name=str(caller_name))],
                body_params=[body],
            ) if callable(call) and isinstance(body.field_info.annotation, type):
                if not all(_is_plain(header.field_info) for header in dependant.header_params):
                    raise DeclarationError(f"{dependant.path}: the header of a quick route is an optional text")
                headers = tuple((field.name, field.alias) for field in dependant.header_params)
                model = body.field_info.annotation
                endpoint = cls(call, request_name, caller_name, require, body.name, model, headers)
                names = {request_name, caller_name, body.name, *(name for name, _ in headers)}
                # A further parameter of the endpoint, for example a query parameter, would get no argument.
                if names == signature(call).parameters.keys():
                    return endpoint
        raise DeclarationError(f"{dependant.path}: a quick route takes a request, a caller, a body and headers only")

    async def arguments(self, request: Request) -> dict[str, Any]:
        """The arguments for `call`, by name. Raises the errors of Require, and RequestValidationError."""
        caller = await self.require(request, await bearer(request))
        headers = {name: request.headers.get(alias) for name, alias in self.headers}
        body = _validated_body(self.model, await request.body())
        return {self.request_name: request, self.caller_name: caller, self.body_name: body, **headers}


def _is_plain(header: FieldInfo) -> bool:
    """Whether the argument for the header needs no check, because it is the header's text, or None."""
    return header.annotation == (str | None) and header.default is None and not header.metadata


def _validated_body(model: type[BaseModel], body: bytes) -> BaseModel:
    if not body:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in errors]) from None
