"""GET /v1/jobs: lists jobs of every kind by a filter, newest first. The console also uses `list_page`."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response

from leasehold.api.auth.security import JOBS_READ, Require
from leasehold.api.http.authenticated_first import AuthenticatedFirst
from leasehold.api.http.cursors import IdCursor, cursor_of, id_of_cursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.http.openapi import problems
from leasehold.api.http.responses import json_response
from leasehold.api.jobs.access import permitted_jobs_of
from leasehold.api.jobs.schemas import JobList
from leasehold.api.jobs.view import summary
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.db import job_lists
from leasehold.db.job_lists import MAX_READ, MAX_READ_BY_QUEUE, MAX_SEARCHED, Listing, Page, Scope
from leasehold.domain.job_filter import MAX_CHARACTERS, JobFilter, parse

#: The type of the query parameter `count`.
Counting = Annotated[bool, Query(description="Also count: exact up to 10,000, above that an estimate.")]
#: The terms of a filter that search. A page of such a filter ends early if it has read too many rows, and its cursor
#: continues the search. A filter without these terms is refused instead.
_SEARCH_TERMS = ("payload", "text", "queue")
router = APIRouter(tags=["jobs"], prefix="/v1/jobs", route_class=AuthenticatedFirst)


@router.get(
    "",
    operation_id="listJobs",
    summary="List jobs of every kind, newest first",
    description="`q` is a filter: `kind:media status:failed tag.customer:7 created:<1h`. A filter that would read more "
    f"than {MAX_READ:,} rows is refused with `filter_too_broad`. A search in payloads and texts reads the newest "
    f"{MAX_SEARCHED:,} jobs, and a search by queue {MAX_READ_BY_QUEUE:,} rows; `next_cursor` continues the search. "
    "Bulk operations on jobs of other tenants are listed only for a key with `fleet:operate`.",
    response_model=JobList,
    responses=problems({
        HTTPStatus.UNPROCESSABLE_ENTITY: "`invalid_cursor`, `invalid_request`, `invalid_filter`: `position` is the "
        "wrong character; `filter_too_broad`",
    }),
)  # fmt: skip
@may_read_standby
async def list_jobs(
    request: Request,
    caller: Annotated[Caller, Depends(Require(JOBS_READ))],
    q: Annotated[str, Query(max_length=MAX_CHARACTERS, description="A filter.")] = "",
    count: Counting = False,  # noqa: FBT002 - a query parameter
    cursor: IdCursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Response:
    services = services_of(request)
    job_filter = parse(q, datetime.now(UTC))
    return json_response(await list_page(services, caller, job_filter, id_of_cursor(cursor), limit, count=count))


async def list_page(
    services: Services, caller: Caller, job_filter: JobFilter, before: UUID | None, limit: int, *, count: bool
) -> dict[str, Any]:
    """A page of the list. `before`: the last job of the previous page; None: this is the first page. Raises
    InvalidFilter if the filter is wrong, or would read too many rows.
    """
    scope = scope_of(services, caller, job_filter)
    if scope is None:
        return {"jobs": [], "next_cursor": None} | ({"count": {"n": 0, "exact": True}} if count else {})
    async with services.pool.acquire() as connection:
        page = await job_lists.page(connection, job_lists.listing_of_page(scope, job_filter, before), limit)
        n, exact = await job_lists.count(connection, Listing(scope, job_filter)) if count else (0, True)
    return _answer(services, job_filter, page) | ({"count": {"n": n, "exact": exact}} if count else {})


def scope_of(services: Services, caller: Caller, job_filter: JobFilter) -> Scope | None:
    """The jobs that the caller may read, limited to the kind and the tenant that the filter names. None: the caller may
    read none of these jobs. Raises InvalidFilter for a kind that the installation does not have.
    """
    kinds = services.job_kinds
    if job_filter.kind is not None and kinds.find(job_filter.kind) is None:
        raise job_filter.refused("kind", f"There is no kind {job_filter.kind}.")
    permitted_jobs = permitted_jobs_of(services, caller, kind=job_filter.kind)
    tenant_id = permitted_jobs.tenant_id if permitted_jobs.tenant_id is not None else job_filter.tenant
    if permitted_jobs.is_empty or (job_filter.tenant is not None and job_filter.tenant != tenant_id):
        return None
    return Scope(
        tenant_id,
        permitted_jobs.pipelines,
        permitted_jobs.runs,
        kinds.unowned,  # the pipelines that belong to no kind
        kinds.owned,  # the pipelines of all kinds
        beyond_tenant=permitted_jobs.tenant_id is None,
    )


def _answer(services: Services, job_filter: JobFilter, page: Page) -> dict[str, object]:
    # A page ends early if it has read too many rows. The answer to a search that ended early has a cursor at the place
    # where it ended. Any other page that ended early is refused.
    items = [summary(row, services.job_kinds.of(row["pipeline"], is_run=row["is_run"])) for row in page.rows]
    if page.ended_at is None:  # `ended_at`: the job at which the page ended early, because it had read too many rows
        return {"jobs": items, "next_cursor": cursor_of(page.rows[-1]["id"]) if page.has_more else None}
    # `positions`: the terms of the filter, and where they stand in its text.
    if not job_filter.positions.keys().isdisjoint(_SEARCH_TERMS):
        # The page has not searched the job `ended_at`, so the next page must begin with this job. A page begins with
        # the largest id below its cursor, so the cursor is this job's id + 1.
        next_cursor = cursor_of(UUID(int=page.ended_at["id"].int + 1))
        return {"jobs": items, "next_cursor": next_cursor, "searched_back_to": page.ended_at["created_at"]}
    first_term = min(job_filter.positions, key=lambda name: job_filter.positions[name], default="")
    raise job_filter.refused(
        first_term,
        f"A page would read more than {MAX_READ:,} rows. Narrow the time, for example with created:<1h.",
        "filter_too_broad",
    )
