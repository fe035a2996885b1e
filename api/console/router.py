"""All pages below the console's path."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from leasehold.api.console import (
    assets,
    audit,
    cells,
    dead_letters,
    job,
    jobs,
    keys,
    openid,
    operations,
    overview,
    people,
    queues,
    schedules,
    session,
    settling,
    signing,
    templating,
    webhooks,
)  # fmt: skip
from leasehold.api.console.rendering import path_of
from leasehold.api.console.routes import ConsoleRoute

#: In the order in which paths are tried.
_PARTS = (
    signing.router,
    openid.router,
    assets.router,
    overview.router,
    jobs.router,
    job.router,
    dead_letters.router,
    operations.router,
    queues.router,
    cells.router,
    schedules.router,
    templating.router,
    webhooks.router,
    keys.router,
    people.router,
    audit.router,
    settling.router,
)
#: The paths below the console's that need no session.
PUBLIC = ("/sign-in", "/enter", "/oidc", "/oidc/callback", "/assets/{hashed}/{name}")
_rest = APIRouter()


@_rest.get("")
async def add_slash(request: Request, _caller: session.Anybody) -> Response:
    return RedirectResponse(f"{path_of(request)}/", HTTPStatus.PERMANENT_REDIRECT)


@_rest.get("/{rest:path}")
async def show_nothing(rest: str, _caller: session.Anybody) -> Response:  # noqa: ARG001 - whatever it is
    raise HTTPException(HTTPStatus.NOT_FOUND)


@cache
def console_router(path: str) -> APIRouter:
    """The console's routes with their whole paths, because the API names routes by whole paths. All apps of a process
    share these routes, as they share the other routers.
    """
    router = APIRouter(prefix=path, route_class=ConsoleRoute, include_in_schema=False)
    for part in (*_PARTS, _rest):
        for route in part.routes:
            assert isinstance(route, APIRoute)
            router.add_api_route(route.path, route.endpoint, methods=sorted(route.methods or ()), name=route.name)
    return router


def public_of(path: str) -> frozenset[str]:
    return frozenset(path + rest for rest in PUBLIC)
