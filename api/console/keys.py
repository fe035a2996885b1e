"""The page of API keys: a person lists, makes, rotates, expires and revokes them.

When a form makes a key, the answer to the form shows the key's secret. No other page and no cookie contains the secret.
If a person presses the form's button twice within a minute, both answers show the same secret.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated, Any

import asyncpg
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import KEYS_WRITE, OPERATE
from leasehold.api.console.once import new_form_token, press_of
from leasehold.api.console.rendering import content_of, go_to, page
from leasehold.api.console.routes import Fields, Form, form_error, required_number, whole_number
from leasehold.api.console.session import SignedIn
from leasehold.api.fleet import keys as endpoints
from leasehold.api.http.cursors import IdCursor
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.domain.errors import Conflict, NotFound
from leasehold.security.credentials import find_key_of
from leasehold.security.roles import NAMES
from leasehold.security.sealing import Sealing

router = APIRouter()
# The person who is signed in, by the scope that a page demands.
Reader = Annotated[Caller, Depends(SignedIn(KEYS_WRITE, or_scope=OPERATE))]
Admin = Annotated[Caller, Depends(SignedIn(KEYS_WRITE))]
_DAY = 86_400
#: The number of keys on a page. It is small, because each row has several forms.
_SHOWN = 25
#: The console makes a key from a seed, which is a signature. Each signature of the platform is made for one purpose,
#: and this text is the purpose of seeds. So no other signature can be a seed.
_SEED_PURPOSE = "seed of an API key"
#: Within this time, a second press of a button shows the secret that the first press has made.
_SHOWN_AGAIN = timedelta(minutes=1)


@router.get("/keys")
async def show_keys(
    request: Request,
    caller: Reader,
    tenant: Annotated[str, Query(max_length=100)] = "",
    ended: Annotated[bool, Query()] = False,  # noqa: FBT002 - a query parameter
    cursor: IdCursor = None,
) -> Response:
    """`ended`: whether the page also shows keys that were revoked or have expired."""
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
        once=new_form_token(),
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
    new_key = await _make_once(request, form, lambda seed: endpoints.make_key(services_of(request), caller, body, seed))
    return _secret_page(request, new_key, f"The key of {body.client_id}")


@router.post("/keys/{prefix}/rotate")
async def rotate(request: Request, prefix: endpoints.Prefix, caller: Admin, form: Fields) -> Response:
    try:
        body = endpoints.Rotation(overlap_seconds=required_number(form, "hours") * 3600)
    except ValidationError as error:
        raise form_error(error, "The key") from None
    services = services_of(request)
    new_key = await _make_once(
        request, form, lambda seed: endpoints.make_successor(services, caller, prefix, body, seed)
    )
    return _secret_page(request, new_key, f"The successor of lh_{prefix}")


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


async def _make_once(
    request: Request, form: Form, make: Callable[[bytes | None], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """Call `make` with a seed for the new key, and return its answer.

    A second press of the form's button has the same seed. So it finds the key of the first press, and makes the same
    secret from the seed. No secret is stored. The second answer must contain the secret, too, because a browser that
    sends a form twice shows only the second answer.
    """
    press = press_of(request, form)  # equal for all presses of one form's button
    if press is None:  # the form has no field `once`: make a random key
        return await make(None)
    services = services_of(request)
    seed = Sealing(services.settings).sign(_SEED_PURPOSE, press.encode()).encode()
    try:
        return await make(seed)
    except (asyncpg.UniqueViolationError, Conflict, NotFound):
        # Probably the first press has made the key. UniqueViolation: this press would make the same key again.
        # Conflict: with this key, the tenant has as many keys as it may have. NotFound: the first press has ended the
        # old key that this press should replace.
        cell = services.settings.cell  # the name of this installation, if there are several cells
        async with services.pool.acquire() as connection:
            earlier_key = await find_key_of(connection, seed, _SHOWN_AGAIN, cell)
        if earlier_key is None:
            raise
        if earlier_key.key is None:  # the key is older than _SHOWN_AGAIN, or cannot be used any more
            sentence = (
                f"This form has made the key lh_{earlier_key.prefix} before. Open the page again to make another."
            )
            raise Conflict("key_made_before", sentence) from None
        return endpoints.new_key_answer(earlier_key.key, earlier_key.tenant_id)


def _secret_page(request: Request, new_key: dict[str, Any], owner: str) -> Response:
    """The page with the secret. It is the direct answer to the form, so that no address leads to the secret again."""
    return page(request, "key_made.html", made=new_key, whose=owner)
