"""The application: the doors behind one edge."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from leasehold.api.auth.security import refuse_open_routes
from leasehold.api.conversion import conversion
from leasehold.api.conversion import events as conversion_events
from leasehold.api.conversion import promote as conversion_promote
from leasehold.api.conversion import result as conversion_result
from leasehold.api.fleet import health, operators
from leasehold.api.generation import callbacks as generation_callbacks
from leasehold.api.generation import events as generation_events
from leasehold.api.generation import generation, source_images
from leasehold.api.generation import queries as generation_queries
from leasehold.api.http import openapi
from leasehold.api.http.caller_first import CallerFirst
from leasehold.api.http.edge import Edge, identity_of
from leasehold.api.http.methods import Methods
from leasehold.api.http.problems import NOT_STORABLE, problem_of
from leasehold.api.media import events as media_events
from leasehold.api.media import media, uploads
from leasehold.api.process import metrics
from leasehold.api.process.services import open_services
from leasehold.api.runs import batches as run_batches
from leasehold.api.runs import dead_letters, external, external_files, runs, schedules, templates, webhooks
from leasehold.api.runs import events as run_events
from leasehold.domain.errors import DeclarationError, LeaseholdError
from leasehold.settings import Settings

#: What needs no key: for machines that watch the process, for whoever makes a client from the contract, and for
#: providers, whose address is a secret itself.
PUBLIC = frozenset({"/livez", "/readyz", "/metrics", openapi.PATH, generation_callbacks.ROUTE})

_DOORS = (
    runs.quick,  # first what is asked most: routes are tried in order
    run_batches.router,
    runs.router,
    uploads.router,
    media.router,
    media_events.router,
    templates.router,
    run_events.router,
    schedules.router,
    conversion.router,
    conversion_events.router,
    conversion_result.router,
    conversion_promote.router,
    generation.router,
    generation_callbacks.router,
    generation_queries.router,
    generation_events.router,
    source_images.router,
    external.router,
    external_files.router,
    dead_letters.router,
    operators.router,
    webhooks.router,
)

_DESCRIPTION = (
    "Upload a picture, and poll until it is READY.\n\n"
    "Errors are RFC 9457 problems with a stable `code`. Every answer carries an `X-Request-Id`."
)


def make_app(settings: Settings) -> FastAPI:
    """An application that opens its own connections when it starts, and starts even when what it needs is down."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_services(settings) as services:
            app.state.services = services
            yield

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
    routers = (*_DOORS, health.router, openapi.router, *([metrics.router] if settings.metrics_public else []))
    for router in routers:
        refuse_open_bodies(app, router)
        refuse_open_routes(app, [route for route in router.routes if isinstance(route, APIRoute)], PUBLIC)
        app.include_router(router)
    app.state.methods = Methods(one for router in routers for one in router.routes if isinstance(one, APIRoute))
    app.openapi = partial(openapi.document, app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    for kind in (LeaseholdError, RequestValidationError, HTTPException, *NOT_STORABLE):
        app.add_exception_handler(kind, _answer_problem)
    app.add_middleware(Edge)  # added last, so outermost
    return app


def refuse_open_bodies(app: FastAPI, router: APIRouter) -> None:
    """Raises DeclarationError for a route whose body would be read before its caller is known."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.body_field is not None and not isinstance(route, CallerFirst):
            raise DeclarationError(f"{app.title}: {route.path} reads its body before it knows its caller")


async def _answer_problem(request: Request, error: Exception) -> Response:
    methods: Methods = request.app.state.methods
    problem = methods.corrected(problem_of(error), request.url.path)
    return problem.response(identity_of(request).request_id)
