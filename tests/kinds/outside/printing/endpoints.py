"""POST /v1/prints, GET /v1/prints/{job_id}."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.security import Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import REFUSED_FOR_NOW, problems
from leasehold.api.http.responses import json_response, publish_and_admit
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.domain.errors import Invalid, NotFound
from leasehold.limits.admission import queues_of
from leasehold.settings import Settings
from leasehold.transitions import limits
from leasehold.transitions.jobs import NewJob
from printing import printing
from printing.settings import PrintingSettings

router = APIRouter(tags=["printing"], route_class=AuthenticatedFirst)
Writer = Annotated[Caller, Depends(Require("printing:write"))]
Reader = Annotated[Caller, Depends(Require("printing:read"))]


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    title: str = Field(min_length=1, max_length=100)
    copies: int = Field(ge=1, le=1000)


@asynccontextmanager
async def open_press(_settings: Settings) -> AsyncIterator[PrintingSettings]:
    yield PrintingSettings()


@router.post(
    "/v1/prints",
    operation_id="createPrint",
    status_code=202,
    responses=problems({
        HTTPStatus.UNPROCESSABLE_ENTITY: "`too_many_copies`, `invalid_request`",
        HTTPStatus.TOO_MANY_REQUESTS: REFUSED_FOR_NOW,
    }),
)  # fmt: skip
async def create_print(request: Request, wanted: Order, caller: Writer) -> Response:
    services = services_of(request)
    press: PrintingSettings = services.opened["printing"]
    if wanted.copies > press.most_copies:
        raise Invalid("too_many_copies", f"An order asks for at most {press.most_copies} copies.")
    job = NewJob(printing, caller.tenant_id, params=wanted.model_dump(), keep_seconds=3600)
    async with services.pool.acquire() as connection, connection.transaction():
        queues = queues_of(caller.tenant_id, printing)
        async with services.admission.submitting(connection, caller.payer, queues) as paid:
            submitted = await limits.submit(connection, job)
        await connection.execute(
            "INSERT INTO print_order (job_id, tenant_id, title, copies) VALUES ($1, $2, $3, $4)",
            job.id, caller.tenant_id, wanted.title, wanted.copies,
        )  # fmt: skip
    await publish_and_admit(services, submitted.hints, submitted.limits)
    return json_response({"job_id": job.id}, HTTPStatus.ACCEPTED, paid.fields)


@router.get(
    "/v1/prints/{job_id}",
    operation_id="getPrint",
    responses=problems({HTTPStatus.NOT_FOUND: "`print_not_found`"}),
)
async def get_print(request: Request, job_id: UUID, caller: Reader) -> Response:
    async with services_of(request).pool.acquire() as connection:
        row = await connection.fetchrow(
            "SELECT o.title, o.copies, j.status, r.value FROM print_order o JOIN job j ON j.id = o.job_id"
            " LEFT JOIN task t ON t.job_id = j.id LEFT JOIN result r ON r.task_id = t.id"
            " WHERE o.job_id = $1 AND o.tenant_id = $2",
            job_id,
            caller.tenant_id,
        )
    if row is None:
        raise NotFound("print_not_found", "There is no such order.")
    return json_response(dict(row))
