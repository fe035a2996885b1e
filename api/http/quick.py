"""Routes for the doors that are asked thousands of times a second.

What a door of ours asks for is a JSON body, its caller and a header: FastAPI's general way to find them costs more than
most doors themselves. The declaration stays FastAPI's, and so do OpenAPI and the errors; only the finding is short.
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
from leasehold.api.http.caller_first import CallerFirst
from leasehold.domain.errors import DeclarationError


class QuickRoute(CallerFirst):
    """Of a door that declares a request, one model as its body, one Require, and headers that are text or not there.

    Raises DeclarationError for any other. The caller is looked at first: without a key nobody learns what is wrong with
    a body.
    """

    def door(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        door = _Door.declared(self.dependant)

        async def handle(request: Request) -> Response:
            return await door.call(**await door.found(request))

        return handle


@dataclass(frozen=True, slots=True)
class _Door:
    """The names of `call`'s parameters, and what they are filled from."""

    call: Callable[..., Awaitable[Response]]
    request: str
    caller: str
    require: Require
    body: str
    model: type[BaseModel]
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def declared(cls, dependant: Dependant) -> _Door:
        match dependant:
            case Dependant(
                call=call,
                request_param_name=str(request),
                dependencies=[Dependant(call=Require() as require, name=str(caller))],
                body_params=[body],
            ) if callable(call) and isinstance(body.field_info.annotation, type):
                headers = tuple((field.name, field.alias) for field in dependant.header_params)
                door = cls(call, request, caller, require, body.name, body.field_info.annotation, headers)
                found = {request, caller, body.name, *(name for name, _ in headers)}
                if found == signature(call).parameters.keys():
                    return door
        raise DeclarationError(f"{dependant.path}: a quick route has a request, a caller, a body and headers")

    async def found(self, request: Request) -> dict[str, Any]:
        """Raises what Require raises, and RequestValidationError."""
        caller = await self.require(request, await bearer(request))
        headers = {name: request.headers.get(alias) for name, alias in self.headers}
        body = _parsed(self.model, await request.body())
        return {self.request: request, self.caller: caller, self.body: body, **headers}


def _parsed(model: type[BaseModel], body: bytes) -> BaseModel:
    if not body:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None
