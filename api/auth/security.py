"""Checks the caller's key and its scope. Every route either has a dependency `Require`, which names a scope, or is
listed as public. `refuse_open_routes` refuses any other route when the API starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import structlog
from fastapi import FastAPI, Request, Security
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from leasehold.api.auth.source_address import source_address
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.api.process.tenant_pool import set_tenant
from leasehold.domain.audit import Actor
from leasehold.domain.errors import DeclarationError, Forbidden, Unauthenticated
from leasehold.security.credentials import parse_key

# The scopes of keys. The first eleven are for one kind of work each.
MEDIA_WRITE = "media:write"
MEDIA_READ = "media:read"
RUNS_WRITE = "runs:write"
RUNS_READ = "runs:read"
TEMPLATES_WRITE = "templates:write"
EXTERNAL_WORK = "external:work"
WEBHOOKS_WRITE = "webhooks:write"
CONVERSION_WRITE = "conversion:write"
CONVERSION_READ = "conversion:read"
GENERATION_WRITE = "generation:write"
GENERATION_READ = "generation:read"
#: The next three scopes are for /v1/jobs, which serves the jobs of all kinds. For each job a key also needs the scope
#: of the job's kind, such as RUNS_READ to read a run.
JOBS_READ = "jobs:read"
JOBS_OPERATE = "jobs:operate"
JOBS_DELETE = "jobs:delete"
#: To list, make, rotate, expire and revoke the keys of the tenant.
KEYS_WRITE = "keys:write"
#: To list the people of the tenant (who sign in by OpenID Connect), to set their roles, and to disable them.
PEOPLE_WRITE = "people:write"
#: To read the audit of the tenant: who did what.
AUDIT_READ = "audit:read"
#: For operators: the queues, workers and limits of all tenants.
OPERATE = "fleet:operate"

bearer = HTTPBearer(
    scheme_name="ApiKey",
    bearerFormat="lh_<prefix>_<secret>",
    description="An API key, as `leasehold keys create` printed it.",
    auto_error=False,
)


class Require:
    """A dependency that returns the caller, if the key is valid and has the scope.

    `or_scope`: another scope that admits the caller; the endpoint itself then limits what the caller may do. Raises
    Unauthenticated without a valid key, and Forbidden if the key has neither scope.
    """

    #: Whether the audit counts the requests of strangers, which are callers without a valid key.
    counts_strangers = True

    def __init__(self, scope: str, *, or_scope: str | None = None) -> None:
        self.scope = scope
        self._admitting_scopes = {scope, or_scope}

    async def __call__(
        self,
        request: Request,
        credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)],
    ) -> Caller:
        # For this request: each Require that has admitted the caller -> the caller that it returned.
        admitted_callers: dict[Require, Caller] = request.scope.setdefault("state", {}).setdefault("admitted", {})
        if self not in admitted_callers:
            admitted_callers[self] = await self.admit(request, credentials)
        return admitted_callers[self]

    async def admit(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        """Identify the caller and check its scope. The route class AuthenticatedFirst calls `__call__` before it reads
        the body, and then FastAPI calls `__call__` again. But this method runs only once for each request, because
        `__call__` keeps the caller. Raises Unavailable `busy` if too many requests of the tenant are under way.
        """
        try:
            caller = await self.identify(request, credentials)
        except Unauthenticated as error:
            if self.counts_strangers:
                text = "" if credentials is None else credentials.credentials
                services_of(request).refusals.add(error.code, stranger(request, text), request.url.path)
            raise
        structlog.contextvars.bind_contextvars(tenant_id=caller.tenant_id, client_id=caller.client_id)
        set_tenant(caller.tenant_id)  # the request's database connections count for this tenant
        try:
            self.refuse(caller)
        except Forbidden as error:
            services_of(request).refusals.add(error.code, caller.actor, request.url.path)
            raise
        # Count the request as under way. `Edge` (the outermost middleware, http/edge.py) ends this count after the
        # answer.
        services_of(request).tenant_requests.begin(request.scope["state"], caller.tenant_id)
        return caller

    async def identify(self, request: Request, credentials: HTTPAuthorizationCredentials | None) -> Caller:
        """The caller whose key the request has. Raises Unauthenticated without a valid key, and WrongCell if another
        installation serves the key's tenant. Raises one of TRY_AGAIN (leasehold.runtime.transient) if PostgreSQL does
        not answer.
        """
        # A request with several Authorization headers is refused, because it is unclear which of them counts.
        if credentials is None or len(request.headers.getlist("authorization")) != 1:
            raise Unauthenticated("missing_api_key", "Send `Authorization: Bearer <API key>`.")
        return with_source(request, await services_of(request).keyring.identify(credentials.credentials))

    def refuse(self, caller: Caller) -> None:
        """Raises Forbidden if the caller's key lacks the scope."""
        if not self._admitting_scopes & caller.scopes:
            holder = "The API key" if caller.person_id is None else "Your role"
            raise Forbidden("insufficient_scope", f"{holder} lacks the scope {self.scope}.")


def tenant_of(caller: Caller) -> str | None:
    """The tenant whose objects the caller may use; None for an operator, who may use the objects of all tenants."""
    return None if OPERATE in caller.scopes else caller.tenant_id


def listed_tenant(caller: Caller, tenant: str | None) -> str | None:
    """The tenant whose objects to list; None: all tenants. For an operator, this is the tenant that the request names
    (`tenant`). For any other caller, it is the caller's own tenant.
    """
    return tenant if OPERATE in caller.scopes else caller.tenant_id


def with_source(request: Request, caller: Caller) -> Caller:
    """The caller, with the address and the id of the request for the audit."""
    return replace(caller, source_ip=source_address(request), request_id=request_id_of(request))


def stranger(request: Request, key: str) -> Actor:
    """The actor that the audit names for a refused key. `key`: the text that the client sent. If the text has the form
    of a key, the actor has the public prefix of this key. Otherwise the actor has no part of the text.
    """
    presented = parse_key(key)
    prefix = None if presented is None else presented.prefix
    return Actor("key", "", None, prefix, source_address(request), request_id_of(request))


def request_id_of(request: Request) -> str:
    request_id: str = request.scope["state"]["identity"].request_id
    return request_id


def requirements(dependant: Dependant) -> list[Require]:
    """Every Require of a route. `dependant`: FastAPI's record of the route, or of one of its dependencies."""
    direct_requirements = [dependant.call] if isinstance(dependant.call, Require) else []
    return direct_requirements + [require for child in dependant.dependencies for require in requirements(child)]


def scopes_of(routes: Iterable[APIRoute]) -> dict[tuple[str, str], list[str]]:
    """The scopes that an API key needs for each route, by (path, method in lower case)."""
    return {
        (route.path_format, method.lower()): sorted({require.scope for require in requirements(route.dependant)})
        for route in routes
        for method in route.methods or ()
    }


def refuse_open_routes(app: FastAPI, routes: list[APIRoute], public: frozenset[str]) -> None:
    """Raises DeclarationError if a route of `app` names no scope and is not in `public`."""
    for route in routes:
        if route.path not in public and not requirements(route.dependant):
            raise DeclarationError(f"{app.title}: {route.path} names no scope and is not public")
