"""/v1/views: filters of jobs that people of a tenant have saved under a name. The console shows these views and its
built-in views.
"""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.audit import record
from leasehold.api.auth.security import JOBS_OPERATE, JOBS_READ, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db import saved_views
from leasehold.domain.errors import NotFound
from leasehold.domain.job_filter import MAX_CHARACTERS, InvalidFilter, parse
from leasehold.limits.bounds import check_room

router = APIRouter(tags=["jobs"], prefix="/v1/views", route_class=AuthenticatedFirst)
Reader = Annotated[Caller, Depends(Require(JOBS_READ))]
Operator = Annotated[Caller, Depends(Require(JOBS_OPERATE))]


class View(BaseModel):
    """`saved_by`: the client or the person that saved the view last."""

    id: UUID
    name: str
    filter: str
    saved_by: str
    saved_at: datetime


class ViewList(BaseModel):
    views: list[View]


class NewView(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=60)
    filter: str = Field(min_length=1, max_length=MAX_CHARACTERS, description="As `q` of `GET /v1/jobs`.")


@router.get(
    "",
    operation_id="listViews",
    summary="List the saved views of the tenant, by name",
    response_model=ViewList,
    responses=problems({}),
)
async def list_views(request: Request, caller: Reader) -> Response:
    async with services_of(request).pool.acquire() as connection:
        rows = await saved_views.list_views(connection, caller.tenant_id)
    return json_response({"views": [dict(row) for row in rows]})


@router.put(
    "",
    operation_id="saveView",
    summary="Save a filter of jobs by a name",
    description="A view with this name gets the new filter.",
    response_model=View,
    responses=problems({
        HTTPStatus.CONFLICT: "`too_many_views`",
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_filter`: `position` says at which character; `invalid_request`",
    }),
)  # fmt: skip
async def save_view(request: Request, body: NewView, caller: Operator) -> Response:
    services = services_of(request)
    try:
        parse(body.filter, datetime.now(UTC))
    except InvalidFilter as error:
        error.pointer = "#/filter"  # the place of the filter in the body, for the problem in the answer
        raise
    async with services.pool.acquire() as connection, connection.transaction():
        if not await saved_views.exists(connection, caller.tenant_id, body.name):
            at_most = min(services.settings.views_per_tenant, saved_views.MAX_VIEWS)
            await check_room(connection, "saved_view", caller.tenant_id, at_most)
        row = await saved_views.save(connection, caller.tenant_id, body.name, body.filter, caller.client_id)
        await record(connection, caller, "view.saved", row["id"], name=body.name, filter=body.filter)
    return json_response(dict(row))


@router.delete(
    "/{view_id}",
    operation_id="deleteView",
    summary="Delete a saved view",
    status_code=204,
    responses=problems({HTTPStatus.NOT_FOUND: "`view_not_found`"}),
)
async def delete_view(request: Request, view_id: UUID, caller: Operator) -> Response:
    async with services_of(request).pool.acquire() as connection, connection.transaction():
        name = await saved_views.delete(connection, caller.tenant_id, view_id)
        if name is None:
            raise NotFound("view_not_found", "There is no such view.")
        await record(connection, caller, "view.deleted", view_id, name=name)
    return Response(status_code=HTTPStatus.NO_CONTENT)
