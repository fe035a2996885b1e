"""The page of cells: what each cell has to do, and in which cell a job or a tenant is. The page is there only in an
installation with cells, and only for operators.
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
from leasehold.api.http.may_lag import may_lag
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.db.cell_reads import MAX_COUNTED

router = APIRouter()
Operator = Annotated[Caller, Depends(SignedIn(OPERATE))]
_SHARED_SECONDS = 2.0


@router.get("/cells")
@may_lag
async def show_cells(request: Request, _caller: Operator, find: Annotated[str, Query(max_length=100)] = "") -> Response:
    """`find`: the id of a job, or the name of a tenant."""
    endpoints.cells_of(services_of(request))
    shared: Shared[list[endpoints.Cell]] = state_of(request).answers.of("cells", _SHARED_SECONDS)
    cells = await shared.get("all", lambda: endpoints.all_cells(request))
    wanted = find.strip()
    found = await _found(request, wanted) if wanted else None
    return page(
        request,
        "cells.html",
        live=0 if wanted else 5,
        live_url=request.url.path,
        cells=cells,
        wanted=wanted,
        found=found,
        most=MAX_COUNTED,
    )


async def _found(request: Request, wanted: str) -> endpoints.FoundInCells:
    try:
        job_id = UUID(wanted)
    except ValueError:
        return await endpoints.found_in_cells(request, None, wanted)
    return await endpoints.found_in_cells(request, job_id, None)
