"""The page of cells (installations, each of which has a part of the tenants): the load of each cell, and in which cell
a job or a tenant is. Only installations with cells have this page, and only operators see it.
"""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import OPERATE
from leasehold.api.console.rendering import page
from leasehold.api.console.session import SignedIn
from leasehold.api.console.shared import Shared
from leasehold.api.console.state import state_of
from leasehold.api.fleet import cells as endpoints
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db.cell_reads import MAX_COUNTED

router = APIRouter()
Operator = Annotated[Caller, Depends(SignedIn(OPERATE))]
#: The loads of the cells are read once for all requests that come within this many seconds.
_SHARED_SECONDS = 2.0


@router.get("/cells")
@may_read_standby
async def show_cells(request: Request, _caller: Operator, find: Annotated[str, Query(max_length=100)] = "") -> Response:
    """`find`: the id of a job, or the name of a tenant."""
    endpoints.cells_of(services_of(request))  # raises NotFound if the installation has no cells
    shared_cells: Shared[list[endpoints.Cell]] = state_of(request).answers.named("cells", _SHARED_SECONDS)
    cells = await shared_cells.get("all", lambda: endpoints.all_cells(request))
    searched_name = find.strip()
    search_result = await _find(request, searched_name) if searched_name else None
    return page(
        request,
        "cells.html",
        refresh_seconds=0 if searched_name else 5,  # a search may ask every cell, so the page does not repeat it
        refresh_url=request.url.path,
        cells=cells,
        searched=searched_name,
        found=search_result,
        max_counted=MAX_COUNTED,
    )


async def _find(request: Request, searched_name: str) -> endpoints.FoundInCells:
    """Find the job with this id. If the text is no UUID, or no cell has such a job, find the tenant with this name
    instead. (A tenant's name may look like a UUID.)
    """
    try:
        job_id = UUID(searched_name)
    except ValueError:
        return await endpoints.search_cells(request, None, searched_name)
    job = await endpoints.search_cells(request, job_id, None)
    if job.found:
        return job
    tenant = await endpoints.search_cells(request, None, searched_name)
    return tenant if tenant.found else job
