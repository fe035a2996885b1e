"""/v1/operations: cancel, retry or delete every job that a filter finds."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import JOBS_DELETE, JOBS_OPERATE, JOBS_READ, OPERATE, Require, tenant_of
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.edge import identity_of
from leasehold.api.http.idempotent import IdempotencyKey
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import json_response
from leasehold.api.jobs.access import check_targets
from leasehold.api.jobs.operating import preview, submit, view
from leasehold.api.jobs.schemas import NewOperation, OperationAnswer, OperationList, OperationPreview, RefusalList
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import operation_reads
from leasehold.db.idempotency import check_key
from leasehold.db.job_reads import Row
from leasehold.domain.errors import NotFound

router = APIRouter(tags=["operations"], prefix="/v1/operations", route_class=AuthenticatedFirst)
#: The caller of an endpoint. The caller's API key must have this scope (for `Operator`: one of the two scopes).
Reader = Annotated[Caller, Depends(Require(JOBS_READ))]
Operator = Annotated[Caller, Depends(Require(JOBS_OPERATE, or_scope=JOBS_DELETE))]
#: For the API's description: the error of an endpoint whose operation does not exist.
_MISSING = {HTTPStatus.NOT_FOUND: "`operation_not_found`"}


@router.post(
    "",
    operation_id="createOperation",
    summary="Cancel, retry or delete every job that a filter finds",
    description="The answer is 202 with the operation, which is a job of the kind `operation`. Workers run it in small "
    "batches, and `POST /v1/jobs/{id}/cancel` aborts it. An operation acts on jobs that exist now, and never on jobs "
    "that are created later. A retry acts on jobs that have failed by now, a cancel on unfinished jobs. `dry_run` "
    "changes nothing: the answer is 200 with a count and examples. A delete needs `jobs:delete`, the others need "
    "`jobs:operate`. An operation acts only on jobs of kinds for which the key has the write scope.",
    status_code=202,
    response_model=OperationAnswer,
    responses=problems({
        HTTPStatus.CONFLICT: "`too_many_operations`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_filter`: `position` says at which character",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }) | {200: {"model": OperationPreview, "description": "What a `dry_run` found."}},
)  # fmt: skip
async def create_operation(
    request: Request, body: NewOperation, caller: Operator, idempotency_key: IdempotencyKey = None
) -> Response:
    services = services_of(request)
    if body.dry_run:
        check_key(idempotency_key)  # refuse an invalid key, although a preview does not use it
        return json_response(await preview(services, caller, body))
    submitted = await submit(services, caller, body, idempotency_key, identity_of(request).trace)
    return json_response(submitted.answer.body, submitted.answer.status_code, submitted.limit_headers)


@router.get(
    "",
    operation_id="listOperations",
    summary="List bulk operations, newest first",
    description="Operations on jobs of other tenants are listed only for a key with `fleet:operate`.",
    response_model=OperationList,
    responses=problems({HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`"}),
)
@may_read_standby
async def list_operations(
    request: Request, caller: Reader, cursor: IdCursor = None, limit: Annotated[int, Query(ge=1, le=100)] = 50
) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await operation_reads.newest(
            connection, caller.tenant_id, id_of_cursor(cursor), limit + 1, beyond_tenant=OPERATE in caller.scopes
        )
    next_cursor = cursor_of(rows[limit - 1]["id"]) if len(rows) > limit else None
    return json_response({"operations": [view(row) for row in rows[:limit]], "next_cursor": next_cursor})


@router.get(
    "/{operation_id}",
    operation_id="getOperation",
    summary="Get a bulk operation and its progress",
    response_model=OperationAnswer,
    responses=problems(_MISSING),
)
async def get_operation(request: Request, operation_id: UUID, caller: Reader) -> Response:
    return json_response(view(await _find(services_of(request), caller, operation_id)))


@router.get(
    "/{operation_id}/refusals",
    operation_id="listRefusals",
    summary="List the jobs that a bulk operation could not act on",
    description="Each refused job with its code. An operation keeps at most LEASEHOLD_OPERATION_REFUSALS of them, and "
    "counts all.",
    response_model=RefusalList,
    responses=problems(_MISSING | {HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`"}),
)
async def list_refusals(
    request: Request,
    operation_id: UUID,
    caller: Reader,
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    services = services_of(request)
    operation = await _find(services, caller, operation_id)
    async with services.pool.acquire() as connection:
        rows = await operation_reads.refusals(
            connection, operation["tenant_id"], operation_id, id_of_cursor(cursor), limit + 1
        )
    next_cursor = cursor_of(rows[limit - 1]["job_id"]) if len(rows) > limit else None
    return json_response({"refusals": [dict(row) for row in rows[:limit]], "next_cursor": next_cursor})


async def _find(services: Services, caller: Caller, operation_id: UUID) -> Row:
    async with services.pool.acquire() as connection:
        row = await operation_reads.find(connection, tenant_of(caller), operation_id)
    if row is None:
        raise NotFound("operation_not_found", "There is no such operation.")
    check_targets(caller, row["tenant_id"], row["params"])
    return row
