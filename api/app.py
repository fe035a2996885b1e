"""Builds the FastAPI application, with every router behind one middleware: `Edge`. `python -m leasehold.api` serves
this application.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from leasehold.api.auth.security import refuse_open_routes, scopes_of
from leasehold.api.console.router import console_router, public_paths_of
from leasehold.api.console.state import ConsoleState
from leasehold.api.fleet import audit, cells, health, keys, operators, people, scaling
from leasehold.api.fleet.health import Readiness
from leasehold.api.http import openapi
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.edge import Edge, identity_of
from leasehold.api.http.methods import Methods
from leasehold.api.http.openapi import Contract
from leasehold.api.http.problems import NOT_STORABLE, problem_of
from leasehold.api.jobs import dead_letters, jobs, operations, unsettled, views
from leasehold.api.jobs import lists as job_lists
from leasehold.api.jobs import logs as job_logs
from leasehold.api.process import metrics
from leasehold.api.process.services import open_services
from leasehold.api.runs import batches as run_batches
from leasehold.api.runs import (
    callbacks,
    creating,
    external,
    external_files,
    external_output,
    replays,
    runs,
    schedules,
    signals,
    templates,
    webhooks,
)
from leasehold.api.runs import events as run_events
from leasehold.api.runs import logs as run_logs
from leasehold.domain.errors import DeclarationError, RequestError, StoreError
from leasehold.domain.kind import Kind
from leasehold.domain.registry import Pipelines
from leasehold.kinds.loading import load
from leasehold.kinds.settings import check_settings
from leasehold.pipelines import SHIPPED, kinds_of, with_bulk_operations
from leasehold.settings import Settings

#: The paths that need no API key. Monitoring reads the first three, and a program that generates a client reads
#: `openapi.PATH`. A kind of work, such as media, may name further public paths.
PUBLIC = frozenset({"/livez", "/readyz", "/metrics", openapi.PATH})

#: A parameter in the path of a route, such as `{job_id}`.
_PARAMETER = re.compile(r"\{[^}]*\}")

#: FastAPI tries routes in this order: _BUSIEST, the routes of the kinds of work that ship with the platform, _REST, the
#: routes of all other kinds, and the console's routes. A kind that does not ship with the platform may use no path of
#: the platform.
_BUSIEST = (creating.router, run_batches.router, runs.router, replays.router)
_REST = (
    templates.router,
    run_events.router,
    signals.router,
    run_logs.router,
    schedules.router,
    external.router,
    external_files.router,
    external_output.router,
    job_lists.router,
    jobs.router,
    job_logs.router,
    operations.router,
    dead_letters.router,
    unsettled.router,
    views.router,
    operators.router,
    scaling.router,
    cells.router,
    audit.router,
    keys.router,
    people.router,
    webhooks.router,
    callbacks.router,
    health.router,
    openapi.router,
)

_DESCRIPTION = (
    "Upload a picture, and poll until it is READY.\n\n"
    "Errors are RFC 9457 problems with a stable `code`. Every answer carries an `X-Request-Id`."
)


def make_app(settings: Settings) -> FastAPI:
    """Build the application. The application opens its connections when it starts. It starts even if PostgreSQL, the
    broker or the store is down.

    Raises DeclarationError for pipelines or kinds of work that cannot be served.
    """
    # Every installation has the pipeline of bulk operations (jobs that act on many jobs).
    pipelines = with_bulk_operations(Pipelines.from_source(settings.pipelines))
    kinds = kinds_of(pipelines)
    check_settings(kinds)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services(settings, pipelines) as services:
            app.state.services = services
            app.state.readiness = readiness = Readiness(services)
            app.state.console = ConsoleState(settings)
            yield
            await readiness.close()

    app = FastAPI(
        title="Leasehold",
        summary="A durable job platform.",
        description=_DESCRIPTION,
        version=version("leasehold"),
        servers=[{"url": settings.public_url}] if settings.public_url else None,
        openapi_url=None,  # served by leasehold.api.http.openapi
        redirect_slashes=False,
        lifespan=lifespan,
    )
    path = settings.console_path
    public = PUBLIC.union(*(kind.public for kind in kinds), () if path is None else public_paths_of(path))
    routers = _routers(settings, kinds)
    for router in routers:
        refuse_open_bodies(app, router)
        refuse_open_routes(app, _api_routes([router]), public)  # every route that is not public demands a scope
        # `include_router` would make copies of the routes at the first request. The API would serve these copies, and
        # not the route objects that were checked here.
        app.router.routes.extend(router.routes)
    routes = _api_routes(routers)
    app.state.scopes, app.state.methods = scopes_of(routes), Methods(routes)
    app.state.contract = Contract(app)  # the OpenAPI document, built at the first request for it
    app.openapi = partial(openapi.document, app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    # NOT_STORABLE: the errors by which PostgreSQL refuses a text with a NUL character. An error of any class that this
    # list does not have is a bug or an outage. `Edge` logs and answers such an error.
    for error in (RequestError, StoreError, RequestValidationError, HTTPException, *NOT_STORABLE):
        app.add_exception_handler(error, _answer_problem)
    app.add_middleware(Edge, database_seconds=settings.database_timeout)  # added last, so outermost
    return app


def _routers(settings: Settings, kinds: Sequence[Kind]) -> list[APIRouter]:
    """All routers, in the order in which FastAPI tries them. A kind names its routers as "module:attribute". A process
    that serves only the console has only the routers of the console and of monitoring. Raises DeclarationError if a
    kind of work uses a path of the platform or of another kind.
    """
    consoles = [] if settings.console_path is None else [console_router(settings.console_path)]
    monitoring = [metrics.router] if settings.metrics and settings.metrics_public else []
    if settings.console_only:
        return [health.router, *monitoring, *consoles]
    shipped_routers = [load(name) for kind in kinds if kind in SHIPPED for name in kind.routers]
    platform_routers = [*_BUSIEST, *shipped_routers, *_REST, *monitoring]
    used_paths = _paths_of(platform_routers)
    # The console's routes come last, because the last of them matches every path below the console's path. So the
    # routes of other kinds come before them, and such a route could match the path of a page of the console. A kind
    # with such a route is refused. To find it, this function puts an example, `x`, in place of each parameter of a
    # page's path.
    console_paths = {_PARAMETER.sub("x", path) for path in _paths_of(consoles)}
    routers_of_other_kinds: list[APIRouter] = []
    for kind in kinds:
        if kind in SHIPPED:
            continue
        routers: list[APIRouter] = [load(name) for name in kind.routers]
        paths = _paths_of(routers)
        hidden_paths = {path for path in console_paths if any(_takes(router, path) for router in routers)}
        if taken_paths := paths & used_paths | hidden_paths:
            raise DeclarationError(f"the kind {kind.name} uses paths that are already used: {sorted(taken_paths)}")
        used_paths |= paths
        routers_of_other_kinds += routers
    return platform_routers + routers_of_other_kinds + consoles


def _api_routes(routers: Sequence[APIRouter]) -> list[APIRoute]:
    return [route for router in routers for route in router.routes if isinstance(route, APIRoute)]


def _paths_of(routers: Sequence[APIRouter]) -> set[str]:
    return {route.path for route in _api_routes(routers)}


def _takes(router: APIRouter, path: str) -> bool:
    return any(route.path_regex.match(path) for route in _api_routes([router]))


def refuse_open_bodies(app: FastAPI, router: APIRouter) -> None:
    """Raises DeclarationError for a route that would read a request's body before the API key is checked. A route of
    the class AuthenticatedFirst checks the API key first.
    """
    for route in _api_routes([router]):
        if route.body_field is not None and not isinstance(route, AuthenticatedFirst):
            raise DeclarationError(f"{app.title}: {route.path} would read its body before it knows its caller")


async def _answer_problem(request: Request, error: Exception) -> Response:
    """Answer an error of an endpoint. FastAPI calls this function for the classes that `make_app` registers."""
    methods: Methods = request.app.state.methods
    # `corrected` changes a 404 to a 405 if a route without parameters has this path, but another method. It also adds
    # the `Allow` header to a 405.
    problem = methods.corrected(problem_of(error), request.method, request.url.path)
    return problem.response(identity_of(request).request_id)
