"""Keys: which there are, for whom, and when each was used last. A key's secret is nowhere but with its owner."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import OPERATE
from leasehold.api.console.rendering import page
from leasehold.api.console.session import SignedIn
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.security.credentials import list_keys

router = APIRouter()
_MAX_KEYS = 500


@router.get("/keys")
async def show_keys(
    request: Request,
    _caller: Annotated[Caller, Depends(SignedIn(OPERATE))],
    tenant: Annotated[str, Query(max_length=100)] = "",
    ended: Annotated[bool, Query()] = False,  # noqa: FBT002 - a query parameter
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        keys = await list_keys(connection, tenant or None, ended=ended, at_most=_MAX_KEYS)
    return page(request, "keys.html", keys=keys, tenant=tenant, ended=ended, most=_MAX_KEYS)
