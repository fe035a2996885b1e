"""Routes that know their caller before they read a body: who has no key costs no memory."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from leasehold.api.auth.security import bearer, requirements
from leasehold.api.http.edge import identity_of
from leasehold.api.http.media_types import JSON, is_json, wrong_type
from leasehold.api.http.nesting import refusal
from leasehold.api.process.services import services_of


class CallerFirst(APIRoute):
    """FastAPI reads a body before it asks any dependency. This asks the Requires first, and then reads within the
    process's budget. A door without a body that FastAPI parses reads by itself, if it reads at all.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = self.door()
        requires = requirements(self.dependant)
        reads = self.body_field is not None

        async def handle(request: Request) -> Response:
            tenant_id = ""
            for require in requires:
                tenant_id = (await require(request, await bearer(request))).tenant_id
            if not reads:
                return await handler(request)
            services = services_of(request)
            try:
                async with services.bodies.received(request, tenant_id) as whole:
                    body = await whole.body()
                    if body and not is_json(request.headers.get("content-type", "")):
                        raise wrong_type(JSON)
                    unfit = refusal(body, services.settings.json_max_depth)
                    if unfit is not None:
                        return unfit.response(identity_of(request).request_id)
                    return await handler(whole)
            except ClientDisconnect:
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # which nobody reads

        return handle

    def door(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return super().get_route_handler()
