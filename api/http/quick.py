"""The route class of the endpoints that are called thousands of times a second.

Such an endpoint needs a JSON body, its caller and a header. FastAPI's general search for arguments costs more than the
endpoint itself, so this class fills the arguments directly. The declarations, the OpenAPI document and the errors stay
FastAPI's.
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

from leasehold.api.auth.security import Require, bearer
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.domain.errors import DeclarationError


class QuickRoute(AuthenticatedFirst):
    """The route of an endpoint that declares a request, one model as its body, one Require, and optional headers of
    text.

    Raises DeclarationError for any other endpoint. The API checks the key before the body: without a valid key, a
    client learns nothing about the body that it sent.
    """

    def endpoint_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = _Endpoint.declared(self.dependant)

        async def handle(request: Request) -> Response:
            return await endpoint.call(**await endpoint.arguments(request))

        return handle


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """The names of `call`'s parameters, and the source of each argument."""

    call: Callable[..., Awaitable[Response]]
    request: str
    caller: str
    require: Require
    body: str
    model: type[BaseModel]
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def declared(cls, dependant: Dependant) -> _Endpoint:
        match dependant:
            case Dependant(
                call=call,
                request_param_name=str(request),
                dependencies=[Dependant(call=Require() as require, name=str(caller))],
                body_params=[body],
            ) if callable(call) and isinstance(body.field_info.annotation, type):
                headers = tuple((field.name, field.alias) for field in dependant.header_params)
                endpoint = cls(call, request, caller, require, body.name, body.field_info.annotation, headers)
                names = {request, caller, body.name, *(name for name, _ in headers)}
                if names == signature(call).parameters.keys():
                    return endpoint
        raise DeclarationError(f"{dependant.path}: a quick route takes a request, a caller, a body and headers only")

    async def arguments(self, request: Request) -> dict[str, Any]:
        """Raises what Require raises, and RequestValidationError."""
        caller = await self.require(request, await bearer(request))
        headers = {name: request.headers.get(alias) for name, alias in self.headers}
        body = _validated_body(self.model, await request.body())
        return {self.request: request, self.caller: caller, self.body: body, **headers}


def _validated_body(model: type[BaseModel], body: bytes) -> BaseModel:
    if not body:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in errors]) from None
