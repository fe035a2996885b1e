"""Signs a person in and out. A person signs in with an API key, or with a ticket (a link by which `leasehold dev` signs
its user in). The sign-in at an OpenID provider is in another module.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import stranger, with_source
from leasehold.api.console import session, tickets
from leasehold.api.console.rendering import FLASH, go_to, path_of, redirect_to
from leasehold.api.console.routes import Fields, sign_in_page
from leasehold.api.process.keyring import Caller
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
    Sealing(services.settings).sign("console", b"")  # raises Unavailable without sealing keys, which sign the cookie
    try:
        caller = with_source(request, await services.keyring.identify(form.get("key", "").strip()))
    except Unauthenticated as error:
        services.refusals.add(error.code, stranger(request, form.get("key", "").strip()), request.url.path)
        return sign_in_page(request, error)
    return await _begin_session(request, caller, form.get("following", "/"))


@router.get("/enter")
async def enter(
    request: Request,
    ticket: Annotated[str, Query(max_length=200)] = "",
    following: Annotated[str, Query(max_length=500)] = "/",  # the page that opens after the sign-in
) -> Response:
    services = services_of(request)
    key_prefix = tickets.prefix_of_ticket(services.settings, ticket)
    caller = await services.keyring.caller_of_session(key_prefix)
    return await _begin_session(request, with_source(request, caller), following)


async def _begin_session(request: Request, caller: Caller, following: str) -> Response:
    """Begin a session of the caller, and open the page `following`."""
    async with services_of(request).pool.acquire() as connection:
        await record(connection, caller, "session.began", _owner_of_session(caller))
    response = redirect_to(request, following)
    session.begin(services_of(request), request, response, _owner_of_session(caller))
    return response


@router.post("/sign-out")
async def sign_out(request: Request, caller: session.Anybody) -> Response:
    async with services_of(request).pool.acquire() as connection:
        await record(connection, caller, "session.ended", _owner_of_session(caller))
    response = go_to(request, "/sign-in", sentence="")
    response.delete_cookie(FLASH, path=path_of(request) or "/")  # so that the next page shows no sentence
    session.end(services_of(request), response)
    return response


def _owner_of_session(caller: Caller) -> str:
    """The name of the session's owner in the audit: the key's prefix, or the person's id. The cookie names the owner of
    a key's session in the same way, but it names a person in another way (`session.owner_of`).
    """
    return caller.key_prefix or str(caller.person_id)
