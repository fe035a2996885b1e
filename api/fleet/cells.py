"""/v1/cells: an operator of one cell sees the load of all cells, and finds the cell of a job or a tenant. A cell is one
of several installations. Each tenant belongs to one cell.

`/v1/cells/own` and `/v1/cells/own/find` answer for this cell alone. `/v1/cells` and `/v1/cells/find` answer for all
cells. For this they call the first two endpoints of the other cells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import version
from time import monotonic
from typing import Annotated
from urllib.parse import quote
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from leasehold.api.auth.security import OPERATE, Require
from leasehold.api.fleet.health import readiness_of
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import cell_reads
from leasehold.domain.errors import Invalid, NotFound
from leasehold.domain.job_filter import quoted
from leasehold.security.other_cells import (
    Because,
    CellAnswer,
    CellHolding,
    CellLoad,
    Found,
    OtherCells,
    State,
    answer_of_own,
)

router = APIRouter(tags=["operators"], prefix="/v1", route_class=AuthenticatedFirst)
Operator = Annotated[Caller, Depends(Require(OPERATE))]
JobId = Annotated[UUID | None, Query(description="The id of a job.")]
TenantName = Annotated[str | None, Query(min_length=1, max_length=100, description="The name of a tenant.")]
_NO_CELLS = {HTTPStatus.NOT_FOUND: "`no_cells`: the installation is not one of several cells"}
_WRONG_QUERY = {
    HTTPStatus.UNPROCESSABLE_ENTITY: "`job_or_tenant`: neither a job nor a tenant, or both; `invalid_request`"
}


class Cell(BaseModel):
    """`own`: whether this is the cell that answers. `console`: the address of the cell's console; null: it is not
    known, or the cell has none. `tenants_placed`: the number of tenants that the map places in the cell. `load`: null
    if the cell gave no load. `because`: why a cell that is not silent gave no load: `no_key` (the setting `cells_keys`
    has no key for the cell), `key_refused`, `not_understood` (the answer has another form, or did not come),
    `another_cell` (the API at this address calls itself by the name of another cell). `seconds`: how long the cell took
    to answer.
    """

    model_config = ConfigDict(extra="forbid")

    cell: str
    address: str
    own: bool
    console: str | None
    state: State
    because: Because | None
    seconds: float = Field(ge=0)
    tenants_placed: int = Field(ge=0)
    load: CellLoad | None


class CellList(BaseModel):
    model_config = ConfigDict(extra="forbid")

    cells: list[Cell]


class FoundInCell(BaseModel):
    """`link`: the job, or the tenant's jobs, in the console of the cell; null: the cell has no console. `moved_to`: the
    cell to which the tenant has moved. If the tenant has moved, this cell has only old rows.
    """

    model_config = ConfigDict(extra="forbid")

    cell: str
    address: str
    own: bool
    tenant: str | None
    moved_to: str | None
    link: str | None


class FoundInCells(BaseModel):
    """`found`: the cells that have the job or the tenant. The first is the cell to which the job or the tenant belongs
    now. `silent`: the cells that did not answer.
    """

    model_config = ConfigDict(extra="forbid")

    found: list[FoundInCell]
    silent: list[str]


@router.get(
    "/cells",
    operation_id="listCells",
    summary="Ask all cells what they have to do",
    description="The other cells are asked side by side, each for at most two seconds, with the keys of the setting "
    "`cells_keys`. A cell that does not answer has the state `silent`.",
    response_model=CellList,
    responses=problems(_NO_CELLS),
)
@may_read_standby
async def list_cells(request: Request, _caller: Operator) -> Response:
    return json_response({"cells": [cell.model_dump() for cell in await all_cells(request)]})


@router.get(
    "/cells/own",
    operation_id="getOwnCell",
    summary="Get what this cell has to do",
    description="Each number is counted up to 1,000. `due`: tasks that could start now. `oldest_seconds`: how long the "
    "oldest of them has waited. `failed`: steps that failed for good within the last hour.",
    response_model=CellLoad,
    responses=problems(_NO_CELLS),
)
@may_read_standby
async def get_own_cell(request: Request, _caller: Operator) -> Response:
    services = services_of(request)
    return json_response((await _own_load(services, cells_of(services).own)).model_dump())


@router.get(
    "/cells/own/find",
    operation_id="findInOwnCell",
    summary="Ask whether this cell has a job or a tenant",
    response_model=CellHolding,
    responses=problems(_NO_CELLS | _WRONG_QUERY),
)
async def find_in_own_cell(
    request: Request, _caller: Operator, job: JobId = None, tenant: TenantName = None
) -> Response:
    services = services_of(request)
    cells_of(services)  # raises NotFound
    return json_response((await _find_here(services, job, tenant)).model_dump())


@router.get(
    "/cells/find",
    operation_id="findInCells",
    summary="Find the cell of a job or of a tenant",
    response_model=FoundInCells,
    responses=problems(_NO_CELLS | _WRONG_QUERY),
)
async def find_in_cells(request: Request, _caller: Operator, job: JobId = None, tenant: TenantName = None) -> Response:
    return json_response((await search_cells(request, job, tenant)).model_dump())


def cells_of(services: Services) -> OtherCells:
    """The client of the other cells. Raises NotFound `no_cells` if the installation is not one of several cells."""
    if services.other_cells is None:
        raise NotFound("no_cells", "This installation is not a cell: LEASEHOLD_CELL is not set.")
    return services.other_cells


async def all_cells(request: Request) -> list[Cell]:
    """Ask all cells for their load. Returns the cells, sorted by name."""
    services = services_of(request)
    others = cells_of(services)
    own_answer, answers = await asyncio.gather(_own_answer(request, others), others.status())
    cell_of_each_tenant = list(others.map.tenants.values())  # the map places each tenant in a cell
    return [
        Cell(
            cell=answer.cell,
            address=answer.address,
            own=answer.cell == others.own,
            console=_console_address(answer.address, None if answer.load is None else answer.load.console),
            state=answer.state,
            because=answer.because,
            seconds=answer.seconds,
            tenants_placed=cell_of_each_tenant.count(answer.cell),
            load=answer.load,
        )
        for answer in sorted((own_answer, *answers), key=lambda answer: answer.cell)
    ]


async def _own_answer(request: Request, others: OtherCells) -> CellAnswer:
    """What this cell would answer to another cell that asks for its status."""
    began_at = monotonic()
    checks = await readiness_of(request).required_checks()
    state: State = "ready" if all(check.ok for check in checks) else "not_ready"
    load = await _own_load(services_of(request), others.own)
    return CellAnswer(others.own, others.map.addresses[others.own], state, load, None, round(monotonic() - began_at, 3))


async def _own_load(services: Services, own_cell: str) -> CellLoad:
    async with services.pool.acquire() as connection:
        load = await cell_reads.load(connection, services.settings.silent_seconds_of_reads)
    return answer_of_own(dict(load), own_cell, version("leasehold"), services.settings.console_path)


async def _find_here(services: Services, job: UUID | None, tenant: str | None) -> CellHolding:
    """Whether this cell has the job or the tenant. Raises Invalid unless the request names exactly one of the two."""
    if (job is None) == (tenant is None):
        raise Invalid("job_or_tenant", "Name a job or a tenant: one of the two.")
    async with services.pool.acquire() as connection:
        if job is not None:
            row = await cell_reads.holder_of_job(connection, job)
        else:
            row = await cell_reads.holder_of_tenant(connection, str(tenant))
    if row is None:
        return CellHolding(found=False)
    return CellHolding(
        found=True, tenant=row["tenant_id"], moved_to=row["moved_to"], console=services.settings.console_path
    )


async def search_cells(request: Request, job: UUID | None, tenant: str | None) -> FoundInCells:
    """Find the cells that have the job or the tenant. If this cell has the job or the tenant, and the tenant has not
    moved away, no other cell is asked. Raises Invalid as `_find_here` does, and NotFound `no_cells`.
    """
    services = services_of(request)
    others = cells_of(services)
    own_holding = await _find_here(services, job, tenant)
    own_address = others.map.addresses[others.own]
    holders: list[Found] = []
    if own_holding.found:
        holders = [Found(others.own, own_address, own_holding.tenant, own_holding.moved_to, own_holding.console)]
    silent_cells: list[str] = []
    if not own_holding.found or own_holding.moved_to is not None:
        other_holders, silent_cells = await others.find(job_id=job, tenant=tenant)
        holders = [*other_holders, *holders]
    if tenant is not None:
        holders = _home_first(others, tenant, holders)
    return FoundInCells(found=[_with_link(others, holder, job) for holder in holders], silent=silent_cells)


def _home_first(others: OtherCells, tenant: str, holders: Sequence[Found]) -> list[Found]:
    """`holders`, with the home of the tenant first. The home is the cell in which the map places the tenant. If the
    home is missing in `holders`, this function adds it, because the home may be silent, or may have no row of the
    tenant yet.
    """
    home = others.map.tenants.get(tenant)
    if home is None:
        return list(holders)
    home_holders = [holder for holder in holders if holder.cell == home]
    other_holders = [holder for holder in holders if holder.cell != home]
    return [*(home_holders or [Found(home, others.map.addresses[home], tenant, None, None)]), *other_holders]


def _with_link(others: OtherCells, holder: Found, job: UUID | None) -> FoundInCell:
    if job is not None:
        path = f"/jobs/{job}"
    elif holder.tenant:
        path = f"/jobs?q={quote(f'tenant:{quoted(holder.tenant)}', safe='')}"
    else:  # the tenant is not known: link to the first page
        path = "/"
    console = _console_address(holder.address, holder.console)
    return FoundInCell(
        cell=holder.cell,
        address=holder.address,
        own=holder.cell == others.own,
        tenant=holder.tenant,
        moved_to=holder.moved_to,
        link=None if console is None else console + path,
    )


def _console_address(address: str, path: str | None) -> str | None:
    """The address of a cell's console. `address`: the address of the cell's API. `path`: the path of the console; None
    if the cell has no console.
    """
    return None if path is None else address + path
