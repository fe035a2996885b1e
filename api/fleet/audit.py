"""/v1/audit: reads who did what to which object, when and from where. The audit's rows of one tenant are a chain: each
row has the hash of the previous row. A tenant reads its own chain, and an operator reads all chains.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from leasehold.api.auth.security import AUDIT_READ, Require, listed_tenant
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import InstantCursor, cursor_of, instant_and_id_of_cursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import encoded, json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.runs.schemas import Instant
from leasehold.db import audit
from leasehold.db.audit import AuditFilter

router = APIRouter(tags=["audit"], prefix="/v1/audit", route_class=AuthenticatedFirst)
Reader = Annotated[Caller, Depends(Require(AUDIT_READ))]
Tenant = Annotated[
    str | None,
    Query(
        max_length=100,
        description="For operators: the chain of this tenant; `*`: acts that do not belong to one tenant; if left out, "
        "all chains.",
    ),
]
_JSON_LINES = "application/x-ndjson"


class AuditRow(BaseModel):
    """`previous` is the hash of the row `seq - 1` of the same tenant. `hash` is SHA-256 over the row and `previous`."""

    id: UUID
    at: datetime
    tenant_id: str
    actor_kind: Literal["key", "person", "command", "platform"]
    actor: str
    actor_tenant: str | None
    key_prefix: str | None
    action: str
    target_kind: str
    target: str
    source_ip: str | None
    request_id: str | None
    details: dict[str, Any]
    seq: int
    previous: str
    hash: str


class AuditPage(BaseModel):
    rows: list[AuditRow]
    next_cursor: str | None


@router.get(
    "",
    operation_id="listAudit",
    summary="List who did what, the latest first",
    response_model=AuditPage,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`"}),
)
@may_read_standby
async def list_audit(
    request: Request,
    caller: Reader,
    tenant: Tenant = None,
    actor: Annotated[str | None, Query(max_length=200)] = None,
    action: Annotated[str | None, Query(max_length=63)] = None,
    target: Annotated[str | None, Query(max_length=200)] = None,
    since: Annotated[Instant | None, Query(description="From this instant on.")] = None,
    until: Annotated[Instant | None, Query(description="Before this instant.")] = None,
    cursor: InstantCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    audit_filter = AuditFilter(listed_tenant(caller, tenant), actor, action, target, since, until)
    before = instant_and_id_of_cursor(cursor)
    async with services_of(request).pool.acquire() as connection:
        rows = await audit.page(connection, audit_filter, before, limit + 1)
    next_cursor = cursor_of(rows[limit - 1]["at"], rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"rows": [audit.as_answer(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.get(
    "/export",
    operation_id="exportAudit",
    summary="Export chains as JSON lines",
    description="Each chain begins with a line `{head}`: its last `seq` and `hash`, and where it begins. Then come its "
    "rows, the oldest first. `leasehold audit verify FILE` checks the export.",
    response_class=StreamingResponse,
    responses=problems({}) | {200: {"description": "One JSON object a line.", "content": {_JSON_LINES: {}}}},
)
async def export_audit(request: Request, caller: Reader, tenant: Tenant = None) -> Response:
    services = services_of(request)
    async with services.pool.acquire() as connection:
        heads = await audit.heads(connection, listed_tenant(caller, tenant))
    tenant_ids = [head["tenant_id"] for head in heads]
    return StreamingResponse(_export_lines(services, tenant_ids), media_type=_JSON_LINES)


async def _export_lines(services: Services, tenant_ids: list[str]) -> AsyncIterator[bytes]:
    """The export in pieces. No connection is held while the client reads a piece."""
    for tenant_id in tenant_ids:
        # Read the head and the oldest rows in one snapshot. Otherwise retention could act between the two reads, and
        # delete rows that the head names as the first of the chain.
        async with (
            services.pool.acquire() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            (head,) = await audit.heads(connection, tenant_id)
            rows = await audit.read_part(connection, head, head["first_seq"] - 1)
        yield encoded({"head": head}) + b"\n"
        while rows:
            yield b"".join(encoded(audit.as_answer(row)) + b"\n" for row in rows)
            async with services.pool.acquire() as connection:
                rows = await audit.read_part(connection, head, rows[-1]["seq"])
