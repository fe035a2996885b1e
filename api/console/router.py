"""The router of all pages of the console, below the console's path. `api/app.py` adds it."""

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

#: The routers of the pages, in the order in which FastAPI tries their paths.
_PAGE_ROUTERS = (
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
#: The paths below the console's path that need no session.
PUBLIC = ("/sign-in", "/enter", "/oidc", "/oidc/callback", "/assets/{hashed}/{name}")
#: Answers the console's path itself, and every path below it that no page has.
_other_paths = APIRouter()


@_other_paths.get("")
async def add_slash(request: Request, _caller: session.Anybody) -> Response:
    return RedirectResponse(f"{path_of(request)}/", HTTPStatus.PERMANENT_REDIRECT)


@_other_paths.get("/{rest:path}")
async def show_nothing(rest: str, _caller: session.Anybody) -> Response:  # noqa: ARG001 - the route needs a parameter
    raise HTTPException(HTTPStatus.NOT_FOUND)


@cache
def console_router(path: str) -> APIRouter:
    """The console's routes with their full paths (`path` included), because the API lists routes by full paths. The
    result is cached, so all apps of a process use the same route objects, as they do with the other routers.
    """
    router = APIRouter(prefix=path, route_class=ConsoleRoute, include_in_schema=False)
    for page_router in (*_PAGE_ROUTERS, _other_paths):
        for route in page_router.routes:
            assert isinstance(route, APIRoute)
            router.add_api_route(route.path, route.endpoint, methods=sorted(route.methods or ()), name=route.name)
    return router


def public_paths_of(path: str) -> frozenset[str]:
    """The full paths that need no session, of a console at `path`."""
    return frozenset(path + page_path for page_path in PUBLIC)
