"""The route class of nearly all endpoints. It checks the API key before it reads the body, so that a client without a
valid key uses none of the API's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from leasehold.api.auth.security import bearer, requirements
from leasehold.api.http.edge import identity_of
from leasehold.api.http.may_read_standby import with_standby
from leasehold.api.http.media_types import JSON, is_json, wrong_type
from leasehold.api.http.strict_json import refusal
from leasehold.api.process.services import services_of


class AuthenticatedFirst(APIRoute):
    """Calls the endpoint's `Require` dependencies first, which check the key and its scopes. Then it reads the body
    within the memory that the process has for bodies (`services.bodies`).

    FastAPI's own routes read the body before they call any dependency. If an endpoint declares no body, this class does
    not read the body, because the endpoint may itself read a form from the request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = self.endpoint_handler()
        requires = requirements(self.dependant)
        has_body = self.body_field is not None

        async def handle(request: Request) -> Response:
            tenant_id = ""
            for require in requires:
                tenant_id = (await require(request, await bearer(request))).tenant_id
            if not has_body:
                return await handler(request)
            services = services_of(request)
            try:
                async with services.bodies.received(request, tenant_id) as received_request:
                    body = await received_request.body()
                    if body and not is_json(request.headers.get("content-type", "")):
                        raise wrong_type(JSON)
                    problem = refusal(body, services.settings.json_max_depth)
                    if problem is not None:  # the body is no strict JSON, or is nested too deep
                        return problem.response(identity_of(request).request_id)
                    return await handler(received_request)
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # the client has disconnected, so nobody reads this

        return handle

    def endpoint_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The function that calls the endpoint. QuickRoute overrides this method."""
        return with_standby(self.endpoint, super().get_route_handler())
