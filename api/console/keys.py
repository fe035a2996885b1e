"""The page of API keys: a person lists, makes, rotates, ends and revokes them.

The answer to the form that makes a key shows the key's secret. No other page and no cookie has it.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import KEYS_WRITE, OPERATE
from leasehold.api.console.rendering import content_of, go_to, page
from leasehold.api.console.routes import Fields, form_error, required_number, whole_number
from leasehold.api.console.session import SignedIn
from leasehold.api.fleet import keys as endpoints
from leasehold.api.http.cursors import IdCursor
from leasehold.api.process.keyring import Caller
from leasehold.security.roles import NAMES

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(KEYS_WRITE, or_scope=OPERATE))]
Admin = Annotated[Caller, Depends(SignedIn(KEYS_WRITE))]
_DAY = 86_400
#: The number of keys on a page. It is small, because each row has several forms.
_SHOWN = 25


@router.get("/keys")
async def show_keys(
    request: Request,
    caller: Reader,
    tenant: Annotated[str, Query(max_length=100)] = "",
    ended: Annotated[bool, Query()] = False,  # noqa: FBT002 - a query parameter
    cursor: IdCursor = None,
) -> Response:
    answer = content_of(await endpoints.list_all_keys(request, caller, tenant or None, ended, cursor, _SHOWN))
    return page(
        request,
        "keys.html",
        keys=answer["keys"],
        cursor=cursor,
        next_cursor=answer["next_cursor"],
        tenant=tenant if OPERATE in caller.scopes else "",
        ended=ended,
        roles=NAMES,
    )


@router.post("/keys/new")
async def make(request: Request, caller: Admin, form: Fields) -> Response:
    fields: dict[str, Any] = {"client_id": form.get("client_id", "").strip(), "scopes": form.get("scopes", "").split()}
    if form.get("role"):
        fields["role"] = form["role"]
    if form.get("tenant", "").strip() and OPERATE in caller.scopes:
        fields["tenant_id"] = form["tenant"].strip()
    if (days := whole_number(form, "days")) is not None:
        fields["expires_in_seconds"] = days * _DAY
    try:
        body = endpoints.NewKeyRequest(**fields)
    except ValidationError as error:
        raise form_error(error, "The key") from None
    return _secret_page(request, await endpoints.create_key(request, body, caller), f"The key of {body.client_id}")


@router.post("/keys/{prefix}/rotate")
async def rotate(request: Request, prefix: endpoints.Prefix, caller: Admin, form: Fields) -> Response:
    try:
        body = endpoints.Rotation(overlap_seconds=required_number(form, "hours") * 3600)
    except ValidationError as error:
        raise form_error(error, "The key") from None
    return _secret_page(
        request, await endpoints.rotate_key(request, prefix, caller, body), f"The successor of lh_{prefix}"
    )


@router.post("/keys/{prefix}/expire")
async def expire(request: Request, prefix: endpoints.Prefix, caller: Admin, form: Fields) -> Response:
    try:
        body = endpoints.Expiry(in_seconds=required_number(form, "days") * _DAY)
    except ValidationError as error:
        raise form_error(error, "The key") from None
    await endpoints.expire_key(request, prefix, body, caller)
    return go_to(request, "/keys", f"lh_{prefix} has its end set.")


@router.post("/keys/{prefix}/revoke")
async def revoke(request: Request, prefix: endpoints.Prefix, caller: Admin) -> Response:
    await endpoints.revoke_key(request, prefix, caller)
    return go_to(request, "/keys", f"lh_{prefix} is revoked.")


def _secret_page(request: Request, response: Response, owner: str) -> Response:
    """The page with the secret. It is the direct answer to the form, so that no address leads to the secret again."""
    return page(request, "key_made.html", made=content_of(response), whose=owner)
