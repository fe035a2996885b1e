"""The page of the audit: who did what to which object, when and from where. Each row has the hash of the row before it,
so the rows are a chain. With these hashes, the page also shows whether a row was changed since it was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import AUDIT_READ, OPERATE
from leasehold.api.console.rendering import content_of, page
from leasehold.api.console.routes import typed_instant
from leasehold.api.console.session import SignedIn
from leasehold.api.console.shared import Shared
from leasehold.api.console.state import state_of
from leasehold.api.fleet import audit as endpoints
from leasehold.api.http.cursors import InstantCursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import audit
from leasehold.domain.audit import BrokenRow

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(AUDIT_READ))]
FilterText = Annotated[str, Query(max_length=200)]
#: The number of audit rows on a page.
_PAGE = 50
#: The page checks at most MAX_CHECKED of a chain's newest rows. For _SHARED_SECONDS, other requests for the page use
#: the result of this check.
MAX_CHECKED, _SHARED_SECONDS = 1000, 30.0


@dataclass(frozen=True, slots=True)
class CheckedChain:
    """The result of a check of a tenant's chain. `rows`: the number of all rows. `checked`: how many of the newest rows
    were checked. `head`: the hash of the newest row. `broken`: the first checked row that was changed since it was
    written; None: all checked rows are intact.
    """

    tenant_id: str
    rows: int
    checked: int
    head: str
    broken: BrokenRow | None


@router.get("/audit")
@may_read_standby
async def show_audit(
    request: Request,
    caller: Reader,
    tenant: Annotated[str, Query(max_length=100)] = "",
    actor: FilterText = "",
    action: FilterText = "",
    target: FilterText = "",
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
        action.strip()[:63] or None,  # the endpoint accepts at most 63 characters
        target.strip() or None,
        typed_instant(since),
        typed_instant(until),
        cursor,
        _PAGE,
    )
    answer = content_of(response)
    chain_tenant = tenant if tenant and OPERATE in caller.scopes else caller.tenant_id
    shared_checks: Shared[CheckedChain] = state_of(request).answers.named("audit", _SHARED_SECONDS)
    return page(
        request,
        "audit.html",
        rows=[row | {"link": _link(row)} for row in answer["rows"]],
        next_cursor=answer["next_cursor"],
        chain=await _check_chain(services, shared_checks, chain_tenant),
        filters={"tenant": tenant, "actor": actor, "action": action, "target": target, "since": since, "until": until},
        cursor=cursor,
        sees_all=OPERATE in caller.scopes,
    )


@router.get("/audit/export")
async def export_audit(
    request: Request, caller: Reader, tenant: Annotated[str, Query(max_length=100)] = ""
) -> Response:
    """The same file of JSON lines as `GET /v1/audit/export`, for people without a key."""
    response = await endpoints.export_audit(request, caller, tenant or None)
    response.headers["Content-Disposition"] = 'attachment; filename="audit.jsonl"'
    return response


async def _check_chain(services: Services, shared_checks: Shared[CheckedChain], tenant_id: str) -> CheckedChain | None:
    """Check the newest rows of the tenant's chain. If `shared_checks` already has the result, return this result.
    Returns None if the chain has no rows.
    """
    async with services.pool.acquire() as connection:
        heads = await audit.heads(connection, tenant_id)
    if not heads:
        return None
    (head,) = heads
    key = (tenant_id, head["seq"], head["hash"])  # with each new row the key is new, so the chain is checked again
    return await shared_checks.get(key, lambda: _check_newest_rows(services, head))


async def _check_newest_rows(services: Services, head: Mapping[str, Any]) -> CheckedChain:
    """Check the newest rows of a chain. `head`: the number and the hash of the chain's last row, and the number of its
    first row (`audit.heads`).
    """
    async with services.pool.acquire() as connection:
        broken = await audit.verify_newest(connection, head, MAX_CHECKED)
    rows = head["seq"] - head["first_seq"] + 1
    return CheckedChain(head["tenant_id"], rows, min(rows, MAX_CHECKED), head["hash"], broken)


#: The console's page for each kind of target.
_PAGES = {"job": "/jobs/{}", "schedule": "/schedules/{}", "webhook": "/webhooks/{}", "operation": "/operations/{}"}


def _link(row: Mapping[str, Any]) -> str:
    return _PAGES[row["target_kind"]].format(row["target"]) if row["target_kind"] in _PAGES else ""
