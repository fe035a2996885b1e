"""Signing in with an API key, or by a ticket that `leasehold dev` made, and signing out."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from leasehold.api.auth.audit import audit
from leasehold.api.console import session
from leasehold.api.console.rendering import HEADERS, go_to, path_of
from leasehold.api.console.routes import Fields, is_path, safe, sign_in_page
from leasehold.api.process.services import services_of
from leasehold.domain.errors import Unauthenticated
from leasehold.security.sealing import Sealing

router = APIRouter()


@router.get("/sign-in")
async def show_sign_in(request: Request) -> Response:
    return sign_in_page(request)


@router.post("/sign-in")
async def sign_in(request: Request, form: Fields) -> Response:
    services = services_of(request)
    Sealing(services.settings).sign("console", b"")  # without sealing keys nobody can sign in: raises Unavailable
    try:
        caller = await services.keyring.identify(form.get("key", "").strip())
    except Unauthenticated as error:
        audit("session.refused", request)
        return sign_in_page(request, error)
    audit("session.began", request, caller)
    return _entered(request, caller.key_prefix, form.get("following", "/"))


@router.get("/enter")
async def enter(
    request: Request,
    ticket: Annotated[str, Query(max_length=200)] = "",
    following: Annotated[str, Query(max_length=500)] = "/",
) -> Response:
    services = services_of(request)
    prefix = session.prefix_of_ticket(services.settings, ticket)
    caller = await services.keyring.of_session(prefix)
    audit("session.began", request, caller)
    return _entered(request, prefix, following)


def _entered(request: Request, key_prefix: str, following: str) -> Response:
    to = path_of(request) + (safe(following) if is_path(following) else "/")
    response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": to} | HEADERS)
    session.begin(services_of(request), request, response, key_prefix)
    return response


@router.post("/sign-out")
async def sign_out(request: Request, caller: session.Anybody) -> Response:
    audit("session.ended", request, caller)
    response = go_to(request, "/sign-in", "")
    response.delete_cookie("leasehold_flash", path=path_of(request) or "/")
    session.end(services_of(request), response)
    return response
