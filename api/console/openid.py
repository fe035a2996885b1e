"""Signs people in by the OpenID provider. A person who has several tenants can change from one to another.

While a person signs in at the provider, a sealed (encrypted) cookie in the browser holds the state of the sign-in. The
cookie is SameSite=Lax, because the provider's site sends the browser back.
"""

from __future__ import annotations

from http import HTTPStatus
from time import time
from typing import Annotated
from uuid import UUID

import orjson
from fastapi import APIRouter, Query, Request, Response

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import request_id_of, with_source
from leasehold.api.auth.source_address import source_address
from leasehold.api.console import session
from leasehold.api.console.rendering import HEADERS, page, path_of, redirect_to
from leasehold.api.console.routes import Fields
from leasehold.api.console.state import state_of
from leasehold.api.process.services import Services, services_of
from leasehold.db.job_reads import Row
from leasehold.domain.audit import Actor
from leasehold.domain.errors import (
    BadGateway,
    Conflict,
    Forbidden,
    NotFound,
    RequestError,
    Unauthenticated,
    Unavailable,
)
from leasehold.limits import people
from leasehold.security.openid import Flow, Identity, OpenId, memberships
from leasehold.security.sealing import Sealing, Unsealable

router = APIRouter()
#: The cookie with the state of a sign-in.
COOKIE = "leasehold_oidc"
#: A person must sign in at the provider within this many seconds.
_MAX_SECONDS = 600
#: The tenant of a person who is not signed in yet.
_NO_TENANT = ""


@router.get("/oidc")
async def send_to_provider(request: Request, following: Annotated[str, Query(max_length=500)] = "/") -> Response:
    """Send the browser to the provider. `following`: the path of the console to open after the sign-in."""
    services = services_of(request)
    openid = _openid_of(services)
    sealing = Sealing(services.settings)
    sealing.sign("console", b"")  # fail before the sign-in if there is no sealing key to sign the session's cookie
    # The random values (state, nonce, verifier) that show that the provider's answer is for this sign-in.
    flow = Flow.new()
    async with state_of(request).sign_ins.turn(_NO_TENANT):  # bounds the requests to the provider
        address = await openid.sign_in_url(flow, _redirect_uri(request))
    text = orjson.dumps([flow.state, flow.nonce, flow.verifier, following, int(time())])
    response = Response(status_code=HTTPStatus.SEE_OTHER, headers={"Location": address} | HEADERS)
    response.set_cookie(
        COOKIE,
        sealing.seal(text).decode(),
        path=f"{path_of(request)}/oidc",
        max_age=_MAX_SECONDS,
        httponly=True,
        samesite="lax",
        secure=session.is_encrypted(services, request),
    )
    return response


@router.get("/oidc/callback")
async def return_from_provider(request: Request) -> Response:
    """Identify the person by the provider's answer, and begin the session."""
    services = services_of(request)
    openid = _openid_of(services)
    flow, following = _begun_sign_in(services, request.cookies.get(COOKIE, ""))
    answer = {name: value[:4096] for name, value in request.query_params.items()}
    try:
        async with state_of(request).sign_ins.turn(_NO_TENANT):
            identity = await openid.identify(flow, _redirect_uri(request), answer)
    except RequestError as error:
        # A failure of the provider, or too many sign-ins at once, is no refusal of the person.
        if not isinstance(error, BadGateway | Unavailable):
            _count_refusal(request, error.code, "")
        raise
    row = await _admit_person(request, services, identity)
    caller = with_source(request, services.keyring.caller_of_person(row))
    async with services.pool.acquire() as connection:
        await record(connection, caller, "session.began", row["id"], issuer=identity.issuer, subject=identity.subject)
    response = _begin_session(request, services, row, following, int(row["seen_at"].timestamp()))
    response.delete_cookie(COOKIE, path=f"{path_of(request)}/oidc", httponly=True, samesite="lax")
    return response


async def _admit_person(request: Request, services: Services, identity: Identity) -> Row:
    """Write the person's rows, one for each tenant to which the person's groups give access. Returns the row of the
    first tenant in which no admin has disabled the person. Raises Forbidden `no_role` if there is no such tenant.
    """
    scopes_by_tenant = memberships(services.settings, identity.groups)
    at_most = services.settings.people_per_tenant
    try:
        async with services.pool.acquire() as connection:
            rows = await people.record_sign_in(connection, identity, scopes_by_tenant, at_most)
    except Conflict as error:  # too_many_people
        _count_refusal(request, error.code, identity.login)
        raise
    admitted_rows = [row for row in rows if row["disabled_at"] is None]
    if not admitted_rows:
        _count_refusal(request, "no_role", identity.login)
        raise Forbidden(
            "no_role", "The provider knows you, but none of your groups has a role here, or an admin has disabled you."
        )
    return admitted_rows[0]


def _begin_session(request: Request, services: Services, row: Row, following: str, began: int) -> Response:
    """Begin the person's session, and redirect to the path `following`. `began`: the time of the sign-in by
    PostgreSQL's clock. The time at which somebody ended the person's sessions comes from the same clock, so the two
    times can be compared.
    """
    response = redirect_to(request, following)
    # `generation`: a number that grows when all sessions of the person end. A session with a lower number has ended.
    session.begin(services, request, response, session.owner_of(row["id"], row["generation"]), began)
    return response


@router.get("/tenants")
async def show_tenants(request: Request, caller: session.Anybody) -> Response:
    return page(request, "tenants.html", people=await _rows_of_person(request, caller.person_id))


@router.post("/tenants/go")
async def change_tenant(request: Request, caller: session.Anybody, form: Fields) -> Response:
    """Begin a session in another tenant of the same person. The new session ends when the present session would have
    ended.
    """
    services = services_of(request)
    rows = await _rows_of_person(request, caller.person_id)
    row = next((row for row in rows if row["tenant_id"] == form.get("tenant")), None)
    if row is None:
        raise NotFound("tenant_not_found", "You have no role in this tenant.")
    new_caller = with_source(request, services.keyring.caller_of_person(row))
    async with services.pool.acquire() as connection:
        await record(connection, new_caller, "session.began", row["id"], issuer=row["issuer"], subject=row["subject"])
    return _begin_session(request, services, row, "/", session.viewer_of(request).session.began)


async def _rows_of_person(request: Request, person_id: UUID | None) -> list[Row]:
    """The person's rows in all tenants to which this session may change. Such a tenant admits the person, and nobody
    has ended the person's sessions there since the sign-in. The list is empty for a session that began with a key.
    """
    if person_id is None:
        return []
    async with services_of(request).pool.acquire() as connection:
        row = await people.find_for_session(connection, person_id)
        rows = [] if row is None else await people.rows_of_subject(connection, row["issuer"], row["subject"])
    began = session.viewer_of(request).session.began
    return [row for row in rows if row["disabled_at"] is None and row["scopes"] and not people.has_ended(row, began)]


def _begun_sign_in(services: Services, cookie: str) -> tuple[Flow, str]:
    """The sign-in that this browser has begun, and the path to open after it. Raises Unauthenticated."""
    expired = Unauthenticated("sign_in_expired", "This sign-in has expired, or began in another browser. Begin again.")
    try:
        text = Sealing(services.settings).open(cookie.encode())
    except Unsealable:
        raise expired from None
    state, nonce, verifier, following, began_at = orjson.loads(text)  # as `send_to_provider` wrote them
    if time() - began_at > _MAX_SECONDS:
        raise expired
    return Flow(state, nonce, verifier), following


def _openid_of(services: Services) -> OpenId:
    if services.openid is None:
        raise NotFound("not_found", "There is nothing at this address.")
    return services.openid


def _redirect_uri(request: Request) -> str:
    base = services_of(request).settings.public_url or str(request.base_url)
    return f"{base.rstrip('/')}{path_of(request)}/oidc/callback"


def _count_refusal(request: Request, code: str, login: str) -> None:
    """Count the refusal for the audit, without a tenant, because no tenant has admitted the person."""
    actor = Actor("person", login, None, None, source_address(request), request_id_of(request))
    services_of(request).refusals.add(code, actor, request.url.path)
