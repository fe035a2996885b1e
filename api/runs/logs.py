"""GET /v1/runs/{run_id}/logs and /stream: reads or follows the lines that a run logs, and the chunks that it emits."""

from __future__ import annotations

from http import HTTPStatus
from uuid import UUID

from fastapi import APIRouter, Request, Response

from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.openapi import problems
from leasehold.api.jobs.following import INVALID, PAGE_OR_SSE, ItemsQuery, answer
from leasehold.api.jobs.logs import LOG, LOG_DESCRIPTION, STREAM, STREAM_DESCRIPTION
from leasehold.api.jobs.schemas import LogPage, StreamPage
from leasehold.api.process.services import services_of
from leasehold.api.runs.runs import Reader, find_listed_run

router = APIRouter(tags=["runs"], prefix="/v1/runs", route_class=AuthenticatedFirst)
# The problems that both endpoints may answer.
_CODES = {HTTPStatus.NOT_FOUND: "`run_not_found`"} | INVALID


@router.get(
    "/{run_id}/logs",
    operation_id="readRunLogs",
    summary="Read or follow what a run logs",
    description=LOG_DESCRIPTION,
    response_model=LogPage,
    responses=problems(_CODES) | PAGE_OR_SSE,
)
async def read_run_logs(request: Request, run_id: UUID, caller: Reader, query: ItemsQuery) -> Response:
    services = services_of(request)
    await find_listed_run(services, caller, run_id)  # only to raise NotFound
    return await answer(services, LOG, services.log_watch, caller.tenant_id, run_id, query)


@router.get(
    "/{run_id}/stream",
    operation_id="readRunStream",
    summary="Read or follow what a run emits",
    description=STREAM_DESCRIPTION,
    response_model=StreamPage,
    responses=problems(_CODES) | PAGE_OR_SSE,
)
async def read_run_stream(request: Request, run_id: UUID, caller: Reader, query: ItemsQuery) -> Response:
    services = services_of(request)
    await find_listed_run(services, caller, run_id)  # only to raise NotFound
    return await answer(services, STREAM, services.stream_watch, caller.tenant_id, run_id, query)
