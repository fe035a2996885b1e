"""/v1/keys: admins list, make, rotate, expire and revoke the keys of their tenant. Operators may do this with the keys
of all tenants. /v1/tenants/usage: what a tenant uses of its quotas.

The caller must have every scope of a new or rotated key, so that nobody can give a scope that they lack. The secret of
a new key is only in the answer to the request that made the key. The API must not store this answer. So the requests
that make or rotate a key take no Idempotency-Key, for which the API would have to store it.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from leasehold.api.auth.security import JOBS_READ, KEYS_WRITE, OPERATE, Require, listed_tenant, tenant_of
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.domain.errors import Forbidden
from leasehold.domain.json_values import Integer, JsonNumber
from leasehold.limits import keys
from leasehold.security.credentials import NewKey, list_keys
from leasehold.security.roles import ROLE_PREFIX, role_and_scopes

router = APIRouter(tags=["keys"], prefix="/v1", route_class=AuthenticatedFirst)
Admin = Annotated[Caller, Depends(Require(KEYS_WRITE))]
Prefix = Annotated[str, Path(pattern=r"^[a-z0-9]{12}$", description="The 12 characters of the key before its secret.")]
_DAY = 86_400
#: A request may name a time of at most a hundred years.
_MAX_SECONDS = 36_500 * _DAY
_MAX_LISTED = 500
_MISSING = {HTTPStatus.NOT_FOUND: "`key_not_found`"}
#: For the API reference: the problems with which a new key is refused.
_REFUSED = {
    HTTPStatus.FORBIDDEN: "`insufficient_scope`, `scope_not_held`: the caller lacks a scope of the key",
    HTTPStatus.CONFLICT: "`too_many_keys`",
    HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_request`, `tenant_reserved`: `*` is no tenant",
}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NewKeyRequest(_Request):
    """`role`, `scopes`, or both. Without `expires_in_seconds`, the key never expires."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"anyOf": [
        {"required": ["role"], "properties": {"role": {"type": "string"}}},
        {"required": ["scopes"], "properties": {"scopes": {"type": "array", "minItems": 1}}},
    ]})  # fmt: skip

    client_id: str = Field(min_length=1, max_length=100, pattern=r"^[!-~]([ -~]*[!-~])?$")
    tenant_id: str | None = Field(
        None,
        min_length=1,
        max_length=100,
        pattern=r"^[!-~]+$",
        description="For operators: the tenant of the key. If left out, the caller's tenant.",
    )
    role: Literal["viewer", "operator", "admin"] | None = None
    scopes: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}:[a-z][a-z0-9-]{0,31}$")]] = Field(
        default_factory=list, max_length=50
    )
    expires_in_seconds: Annotated[int, Field(ge=1, le=_MAX_SECONDS), JsonNumber] | None = None

    @model_validator(mode="after")
    def _allows_something(self) -> Self:
        if self.role is None and not self.scopes:
            raise ValueError("a key needs a role or scopes")
        return self

    def all_scopes(self) -> list[str]:
        return sorted({*self.scopes, *([f"{ROLE_PREFIX}{self.role}"] if self.role is not None else [])})


class Rotation(_Request):
    overlap_seconds: Integer = Field(_DAY, ge=0, le=_MAX_SECONDS, description="How long the old key still works.")


class Expiry(_Request):
    in_seconds: Integer = Field(ge=0, le=_MAX_SECONDS)


def refuse_scopes_not_held(services: Services, caller: Caller, scopes: Collection[str]) -> None:
    """Raises Forbidden `scope_not_held` if the caller lacks one of the scopes. `scopes` may also contain names of
    roles, each with the prefix ROLE_PREFIX. A role stands for its scopes.
    """
    missing_scopes = services.keyring.expanded(scopes) - caller.scopes
    # A role that this release does not know stands for no scopes, so `missing_scopes` does not show it.
    unknown_roles = [
        scope for scope in scopes if scope.startswith(ROLE_PREFIX) and not services.keyring.expanded([scope])
    ]
    if missing_scopes or unknown_roles:
        lacking_scopes = ", ".join(sorted([*missing_scopes, *unknown_roles]))
        raise Forbidden("scope_not_held", f"You can only give scopes that you have. You lack {lacking_scopes}.")


@router.get(
    "/keys",
    operation_id="listKeys",
    summary="List keys, without their secrets",
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"}),
)
async def list_all_keys(
    request: Request,
    caller: Admin,
    tenant: Annotated[str | None, Query(max_length=100, description="For operators: only keys of this tenant.")] = None,
    ended: Annotated[bool, Query(description="Also keys that were revoked or have expired.")] = False,  # noqa: FBT002 - a query parameter
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = _MAX_LISTED,
) -> Response:
    """The order is by tenant, client and age."""
    tenant_id, last_id = listed_tenant(caller, tenant), id_of_cursor(cursor)
    async with services_of(request).pool.acquire() as connection:
        rows = await list_keys(connection, tenant_id, ended=ended, at_most=limit + 1, after=last_id)
    next_cursor = cursor_of(rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"keys": [_key_answer(row) for row in rows[:limit]], "next_cursor": next_cursor})


def new_key_answer(key: NewKey, tenant_id: str) -> dict[str, Any]:
    """The answer with the new key. No other answer contains the key's secret."""
    return {"key": key.text, "prefix": key.prefix, "tenant_id": tenant_id, "expires_at": key.expires_at}


def _key_answer(row: dict[str, Any]) -> dict[str, Any]:
    role, scopes = role_and_scopes(row["scopes"])
    answer = row | {"role": role, "scopes": scopes}
    del answer["id"]  # clients know a key by its prefix
    return answer


@router.post(
    "/keys",
    operation_id="createKey",
    summary="Make a key; the answer alone has its secret",
    status_code=201,
    responses=problems(_REFUSED),
)
async def create_key(request: Request, body: NewKeyRequest, caller: Admin) -> Response:
    return json_response(await make_key(services_of(request), caller, body), HTTPStatus.CREATED)


async def make_key(
    services: Services, caller: Caller, body: NewKeyRequest, seed: bytes | None = None
) -> dict[str, Any]:
    """Make a key, and return the answer with the key. `seed`: a secret from which the key is derived, so that the same
    seed makes the same key again; None: the key is random. Raises the problems that the endpoint `createKey` documents.
    """
    tenant_id = body.tenant_id or caller.tenant_id
    if tenant_id != caller.tenant_id and OPERATE not in caller.scopes:
        raise Forbidden("insufficient_scope", f"The API key lacks the scope {OPERATE}.")
    scopes = body.all_scopes()
    refuse_scopes_not_held(services, caller, scopes)
    lifetime = body.expires_in_seconds
    async with services.pool.acquire() as connection:
        key = await keys.make(
            connection, caller.actor, services.settings.keys_per_tenant,
            tenant_id=tenant_id, client_id=body.client_id, scopes=scopes,
            lifetime=None if lifetime is None else timedelta(seconds=lifetime),
            cell=services.settings.cell,  # a key names its cell, if the installation is one of several cells
            seed=seed,
        )  # fmt: skip
    return new_key_answer(key, tenant_id)


@router.post(
    "/keys/{prefix}/rotate",
    operation_id="rotateKey",
    summary="Make a key's successor; the answer alone has its secret",
    description="The same owner, scopes, quotas and end. The old key stops after the overlap. A key that was rotated "
    "before has an end already. A second rotation does not postpone this end, and the second successor gets the same "
    "end: `expires_at` in the answer says when.",
    status_code=201,
    responses=problems(_MISSING | _REFUSED),
)
async def rotate_key(request: Request, prefix: Prefix, caller: Admin, body: Rotation | None = None) -> Response:
    return json_response(
        await make_successor(services_of(request), caller, prefix, body or Rotation()), HTTPStatus.CREATED
    )


async def make_successor(
    services: Services, caller: Caller, prefix: str, body: Rotation, seed: bytes | None = None
) -> dict[str, Any]:
    """Make the successor of the key with the prefix `prefix`, and return the answer with the successor. `seed`: as for
    `make_key`. Raises the problems that the endpoint `rotateKey` documents.
    """
    overlap = timedelta(seconds=body.overlap_seconds)
    async with services.pool.acquire() as connection, connection.transaction():
        # `tenant_of`: None for an operator, who may act on the keys of all tenants.
        row = await keys.find(connection, prefix, tenant_of(caller))
        refuse_scopes_not_held(services, caller, row["scopes"])
        at_most, cell = services.settings.keys_per_tenant, services.settings.cell
        key = await keys.rotate(
            connection, caller.actor, prefix, overlap, at_most, tenant_of(caller), cell=cell, seed=seed
        )
    return new_key_answer(key, row["tenant_id"])


@router.post(
    "/keys/{prefix}/expire",
    operation_id="expireKey",
    summary="Set when a key ends; never later than before",
    responses=problems(_MISSING),
)
async def expire_key(request: Request, prefix: Prefix, body: Expiry, caller: Admin) -> Response:
    lifetime = timedelta(seconds=body.in_seconds)
    async with services_of(request).pool.acquire() as connection:
        ends_at = await keys.expire(connection, caller.actor, prefix, lifetime, tenant_of(caller))
    return json_response({"prefix": prefix, "expires_at": ends_at})


@router.delete(
    "/keys/{prefix}",
    operation_id="revokeKey",
    summary="Revoke a key for good",
    description="Every API process refuses it within `LEASEHOLD_API_KEY_CACHE_SECONDS`.",
    status_code=204,
    responses=problems(_MISSING),
)
async def revoke_key(request: Request, prefix: Prefix, caller: Admin) -> Response:
    async with services_of(request).pool.acquire() as connection:
        await keys.revoke(connection, caller.actor, prefix, tenant_of(caller))
    return Response(status_code=HTTPStatus.NO_CONTENT)


@router.get(
    "/tenants/usage",
    operation_id="getUsage",
    summary="Count what a tenant has, and the bytes that are stored for it",
    description="Unfinished jobs are counted up to the tenant's bound, or to a million.",
    responses=problems({}),
)
async def get_usage(
    request: Request,
    caller: Annotated[Caller, Depends(Require(JOBS_READ))],
    tenant: Annotated[
        str | None, Query(max_length=100, description="For operators: the tenant. If left out, the caller's tenant.")
    ] = None,
) -> Response:
    services = services_of(request)
    tenant_id = tenant if tenant is not None and OPERATE in caller.scopes else caller.tenant_id
    async with services.pool.acquire() as connection:
        usage = await services.admission.measure(connection, tenant_id)
    return json_response({"tenant_id": tenant_id} | usage)
