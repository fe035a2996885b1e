"""The page of jobs: a filtered list, its refreshes, saved views, and actions on the jobs that a person picks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from http import HTTPStatus
from time import monotonic
from typing import Annotated, Any
from urllib.parse import urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import JOBS_OPERATE, JOBS_READ, OPERATE, tenant_of
from leasehold.api.console.once import Outcome, act_once, token_of_shown
from leasehold.api.console.rendering import go_to, page
from leasehold.api.console.routes import Fields, form_error
from leasehold.api.console.session import SignedIn, viewer_of
from leasehold.api.console.shared import Shared
from leasehold.api.console.state import state_of
from leasehold.api.http.cursors import IdCursor, id_of_cursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.jobs import jobs as endpoints
from leasehold.api.jobs import views
from leasehold.api.jobs.lists import list_page, scope_of
from leasehold.api.jobs.schemas import Reason, RetryRequest
from leasehold.api.jobs.view import summary
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services, services_of
from leasehold.api.process.tenant_pool import BULK_SECONDS, NOT_TRIED, in_time
from leasehold.db import job_lists, job_reads, saved_views
from leasehold.db.job_lists import Listing
from leasehold.db.job_reads import Row
from leasehold.domain.errors import Invalid, RequestError
from leasehold.domain.ids import id_of_instant, instant_of
from leasehold.domain.job_filter import MAX_CHARACTERS, InvalidFilter, parse, quoted
from leasehold.domain.sentences import counted
from leasehold.domain.states import JobState

router = APIRouter()
#: The saved views of a tenant are read once, and all open lists of the tenant then show them for this many seconds.
_SHARED_SECONDS = 5.0
Reader = Annotated[Caller, Depends(SignedIn(JOBS_READ))]
Operator = Annotated[Caller, Depends(SignedIn(JOBS_OPERATE))]
#: A filter of jobs, as a person writes it (domain/job_filter.py).
Filter = Annotated[str, Query(max_length=MAX_CHARACTERS)]
#: PAGE: the number of jobs on a page. _MAX_READ: how many rows a refresh may read to count newer jobs.
PAGE = 50
_MAX_READ = 2000
#: Prepared filters, by name. No index finds the jobs of all tenants by their status. So for an operator, `views_of`
#: adds the operator's own tenant to each filter that is not empty and has no `created:`.
VIEWS = (
    ("All", ""),
    ("Running", "status:running"),
    ("Queued", "status:queued"),
    ("Held", "status:pending"),
    ("Failed, last hour", "status:failed created:<1h"),
    ("Failed", "status:failed"),
    ("Slow", "duration:>10m created:<1d"),
    ("Cancelled", "status:cancelled"),
)


@router.get("/jobs")
@may_read_standby
async def show_jobs(
    request: Request,
    caller: Reader,
    q: Filter = "",
    cursor: IdCursor = None,
    count: bool = False,  # noqa: FBT001, FBT002 - a query parameter
) -> Response:
    """`count`: whether the page also shows how many jobs match the filter."""
    services, saved = services_of(request), await _read_saved_views(request, caller)
    try:
        job_filter = parse(q, datetime.now(UTC))
        job_page = await list_page(services, caller, job_filter, id_of_cursor(cursor), PAGE, count=count)
    except InvalidFilter as error:
        return _page(request, HTTPStatus.UNPROCESSABLE_ENTITY, q=q, wrong=error, jobs=[], next_cursor=None, saved=saved)
    return _page(request, q=q, cursor=cursor, saved=saved, **job_page)


async def _read_saved_views(request: Request, caller: Caller) -> list[Row]:
    async def read() -> list[Row]:
        async with services_of(request).pool.acquire() as connection:
            return list(await saved_views.list_views(connection, caller.tenant_id))

    shared_views: Shared[list[Row]] = state_of(request).answers.named("views", _SHARED_SECONDS)
    return await shared_views.get(caller.tenant_id, read)


@router.get("/jobs/fresh")
@may_read_standby
async def refresh_jobs(
    request: Request,
    caller: Reader,
    q: Filter = "",
    cursor: IdCursor = None,
    following: IdCursor = None,
    shown: Annotated[str, Query(max_length=40 * PAGE)] = "",
) -> Response:
    """Show the same jobs with their current state, and the number of newer jobs. The page does not add newer jobs, so
    that no row moves while a person reads.

    `shown`: the ids of the jobs on the page. `following`: the cursor of the next page.
    """
    services = services_of(request)
    ids = _ids(shown.split(","))
    async with services.pool.acquire() as connection:
        # An operator also sees bulk operations that act on jobs of other tenants (`beyond_tenant`).
        rows = await job_reads.find_listed(connection, tenant_of(caller), ids, beyond_tenant=OPERATE in caller.scopes)
    summaries = {}
    for row in rows:
        kind = services.job_kinds.of(row["pipeline"], is_run=row["is_run"])
        if kind.scopes is not None and kind.scopes.read in caller.scopes:
            summaries[UUID(str(row["id"]))] = summary(row, kind)
    # `gone`: the job was deleted, or the caller may not read it any more.
    jobs = [summaries.get(job_id) or {"id": job_id, "gone": True} for job_id in ids]
    # Only the first page counts newer jobs. A later page (it has a `cursor`) needs no count, because the pages before
    # it show the newer jobs.
    newer = 0 if cursor is not None else await _count_newer_jobs(services, caller, q, ids)
    saved = await _read_saved_views(request, caller)
    return _page(request, q=q, cursor=cursor, jobs=jobs, next_cursor=following, newer=newer, saved=saved)


async def _count_newer_jobs(services: Services, caller: Caller, q: str, ids: Sequence[UUID]) -> int:
    """How many jobs match the filter and are newer than the jobs on the page. At most PAGE + 1 are counted."""
    now = datetime.now(UTC)
    job_filter = parse(q, now)
    scope = scope_of(services, caller, job_filter)
    if scope is None:  # the caller may read no jobs that match
        return 0
    # `made_until_now`: the jobs on the page whose id has no time in the future. `newest`: the newest of these jobs. If
    # there is none, `newest` is an id of this instant, so that no job that exists now counts as newer.
    made_until_now = [job_id for job_id in ids if _is_made_until(now, job_id)]
    newest = max(made_until_now, default=id_of_instant(now))
    since = instant_of(newest)  # an id begins with the instant of its job's creation
    if job_filter.created_after is not None:
        since = max(since, job_filter.created_after)
    listing = Listing(scope, replace(job_filter, created_after=since), max_read=_MAX_READ)
    async with services.pool.acquire() as connection:
        job_page = await job_lists.page(connection, listing, PAGE)
    newer = [row for row in job_page.rows if row["id"] > newest and row["id"] not in ids]
    return len(newer) + job_page.has_more


def _is_made_until(now: datetime, job_id: UUID) -> bool:
    """Whether the id contains a time, and this time is not after `now`. If an id with a later time were `newest`, no
    job would count as newer.
    """
    try:
        return instant_of(job_id) <= now
    except (ValueError, OverflowError):
        return False


def _ids(texts: Sequence[str]) -> list[UUID]:
    """The first PAGE ids, because no page has more jobs. Empty texts are left out. Raises Invalid for any other text
    that is no id.
    """
    try:
        return [UUID(text) for text in texts[:PAGE] if text]
    except ValueError:
        raise Invalid("invalid_request", "A job's id is malformed.") from None


def views_of(caller: Caller) -> list[tuple[str, str]]:
    """The names and filters of VIEWS for this caller."""
    own_tenant = f" tenant:{quoted(caller.tenant_id)}" if tenant_of(caller) is None else ""
    return [(name, text + own_tenant if text and "created:" not in text else text) for name, text in VIEWS]


def _page(request: Request, status: int = HTTPStatus.OK, **values: Any) -> Response:
    services = services_of(request)
    kinds = ["media", "conversion", "generation", "run", "webhook"]
    # `owned`: the pipelines that belong to a kind of work. `unowned`: all other pipelines.
    pipelines = sorted({*services.job_kinds.unowned, *services.job_kinds.owned})
    suggestions = [  # for the field of the filter
        *(f"status:{state}" for state in JobState),
        *(f"kind:{kind}" for kind in kinds if services.job_kinds.find(kind) is not None),
        *(f"template:{name}" for name in pipelines),
        *("created:<1h", "created:<1d", "created:>1h", "waited:>10m", "duration:>5m", "queue:", "code:", "worker:"),
        *("tag.", "tenant:", "schedule:", "payload./"),
    ]
    page_values = {"wrong": None, "cursor": None, "count": None, "newer": 0, "searched_back_to": None} | values
    return page(
        request,
        "jobs.html",
        status,
        views=views_of(viewer_of(request).caller),
        words=suggestions,
        page_size=PAGE,
        # The form's token is made from the jobs as the page shows them. A second press on the same page sends the same
        # token, and does nothing. An act changes the jobs: a job then has another status or, if it fails again, another
        # end time. So the next page has another token.
        once=token_of_shown(values["jobs"]),
        **page_values,
    )


@router.post("/jobs/act")
async def act_on_picked(request: Request, caller: Operator, form: Fields) -> Response:
    """Retry or cancel each picked job. If a job is refused, or locked for long, the other jobs are still retried or
    cancelled. The next page names the reasons of the refusals.
    """
    ids = _ids(form.picked("job"))
    action = form.get("action", "")
    if action not in ("retry", "cancel") or not ids:
        raise Invalid("invalid_request", "Pick jobs, and retry or cancel them.")

    async def act_on_job(job_id: UUID) -> None:
        if action == "retry":
            await endpoints.retry_job(request, job_id, caller, RetryRequest())
        else:
            await endpoints.cancel_job(request, job_id, caller, Reason(reason=form.get("reason", "")[:500]))

    async def act() -> Outcome:
        refusals = Counter[str]()  # how many jobs were refused for each reason
        async with services_of(request).bulk.turn(caller.tenant_id):  # bounds bulk writes; lifts the deadline
            ends_at = monotonic() + BULK_SECONDS
            for index, job_id in enumerate(ids):
                if index and monotonic() > ends_at:
                    refusals[NOT_TRIED] += len(ids) - index
                    break
                try:
                    # `in_time` raises NotInTime (a RequestError) if PostgreSQL does not write this job in time.
                    with in_time("picked jobs"):
                        await act_on_job(job_id)
                except RequestError as error:
                    refusals[error.message] += 1
        done_count = len(ids) - refusals.total()
        word = "retried" if action == "retry" else "asked to stop"
        sentences = [
            f"{done_count} of {counted(len(ids), 'job', 'jobs')} {word}.",
            *(f"{n} refused: {reason}" for reason, n in refusals.items()),
        ]
        return Outcome(form.get("back", "/jobs"), " ".join(sentences), good=not refusals, has_acted=done_count > 0)

    return await act_once(request, caller, form, act)


@router.post("/jobs/views/save")
async def save_view(request: Request, caller: Operator, form: Fields) -> Response:
    """Save a filter by a name. All people of the tenant see this view above the list."""
    q = form.get("filter", "")
    try:
        body = views.NewView(name=form.get("name", "").strip(), filter=q)
    except ValidationError as error:
        raise form_error(error, "The view") from None
    await views.save_view(request, body, caller)
    state_of(request).answers.named("views", _SHARED_SECONDS).forget()
    return go_to(request, _address_of_list(caller, q), f"The view {body.name} is saved.")


@router.post("/jobs/views/{view_id}/delete")
async def delete_view(request: Request, view_id: UUID, caller: Operator, form: Fields) -> Response:
    async def act() -> Outcome:
        await views.delete_view(request, view_id, caller)
        state_of(request).answers.named("views", _SHARED_SECONDS).forget()
        return Outcome(_address_of_list(caller, form.get("filter", "")), "The view is deleted.")

    return await act_once(request, caller, form, act)


def _address_of_list(caller: Caller, q: str) -> str:
    """The address of the list with this filter. If the caller may not read the list, the address of the Overview."""
    return f"/jobs?{urlencode({'q': q})}" if JOBS_READ in caller.scopes else "/"
