"""Audit: who did what to what, when and from where; and whether the chain is as it was written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import AUDIT_READ, OPERATE
from leasehold.api.console.rendering import content_of, page
from leasehold.api.console.session import SignedIn
from leasehold.api.console.shared import Shared, shared_of
from leasehold.api.fleet import audit as endpoints
from leasehold.api.http.cursors import InstantCursor
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import audit
from leasehold.domain.audit import Broken
from leasehold.domain.errors import Invalid

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(AUDIT_READ))]
Word = Annotated[str, Query(max_length=200)]
_PAGE = 50
#: Rows of a chain that are checked for a page, and the seconds for which the process keeps the answer.
MAX_CHECKED, _CHECKED_SECONDS = 1000, 30.0


@dataclass(frozen=True, slots=True)
class Checked:
    """A chain: its rows, how many of them were checked, and the first that is not as it was written."""

    tenant_id: str
    rows: int
    checked: int
    head: str
    broken: Broken | None


@router.get("/audit")
async def show_audit(
    request: Request,
    caller: Reader,
    tenant: Annotated[str, Query(max_length=100)] = "",
    actor: Word = "",
    action: Word = "",
    target: Word = "",
    since: Annotated[str, Query(max_length=40)] = "",
    until: Annotated[str, Query(max_length=40)] = "",
    cursor: InstantCursor = None,
) -> Response:
    services = services_of(request)
    response = await endpoints.list_audit(
        request,
        caller,
        tenant or None,
        actor.strip() or None,
        action.strip()[:63] or None,
        target.strip() or None,
        _instant(since),
        _instant(until),
        cursor,
        _PAGE,
    )
    answer = content_of(response)
    chain = tenant if tenant and OPERATE in caller.scopes else caller.tenant_id
    shared: Shared[Checked] = shared_of(request, "audit", _CHECKED_SECONDS)
    return page(
        request,
        "audit.html",
        rows=[row | {"link": _link(row)} for row in answer["rows"]],
        next_cursor=answer["next_cursor"],
        chain=await _chain(services, shared, chain),
        wanted={"tenant": tenant, "actor": actor, "action": action, "target": target, "since": since, "until": until},
        cursor=cursor,
        sees_all=OPERATE in caller.scopes,
    )


async def _chain(services: Services, shared: Shared[Checked], tenant_id: str) -> Checked | None:
    """The state of the chain with its head of now. None: it has no rows."""
    async with services.pool.acquire() as connection:
        heads = await audit.heads(connection, tenant_id)
    if not heads:
        return None
    (head,) = heads
    return await shared.get((tenant_id, head["seq"], head["hash"]), lambda: _checked(services, head))


async def _checked(services: Services, head: Mapping[str, Any]) -> Checked:
    async with services.pool.acquire() as connection:
        broken = await audit.verify_newest(connection, head, MAX_CHECKED)
    rows = head["seq"] - head["first_seq"] + 1
    return Checked(head["tenant_id"], rows, min(rows, MAX_CHECKED), head["hash"], broken)


def _instant(text: str) -> datetime | None:
    """A day or an instant that the person typed; without a zone it is UTC. Raises Invalid."""
    if not text.strip():
        return None
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise Invalid("invalid_request", "A time is written as 2026-11-22, or 2026-11-22T14:30.") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


#: By kind of target: where the console shows it.
_PAGES = {"job": "/jobs/{}", "schedule": "/schedules/{}", "webhook": "/webhooks/{}", "operation": "/operations/{}"}


def _link(row: Mapping[str, Any]) -> str:
    return _PAGES[row["target_kind"]].format(row["target"]) if row["target_kind"] in _PAGES else ""
