"""The pages of schedules: when they fire, the runs that they started, and why they paused.

On these pages a person starts a run immediately, and pauses, resumes or changes a schedule. A backfill starts the runs
of past ticks (the times at which a schedule fires). A person previews the backfill first.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

from cronsim import CronSim, CronSimError
from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import JOBS_READ, RUNS_READ, RUNS_WRITE
from leasehold.api.console.rendering import content_of, form_idempotency_key, go_to, page
from leasehold.api.console.routes import Fields, form_error, typed_instant, typed_json
from leasehold.api.console.session import SignedIn
from leasehold.api.http.cursors import IdCursor
from leasehold.api.http.may_read_standby import may_read_standby
from leasehold.api.jobs.lists import list_page
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.api.runs import schedules as endpoints
from leasehold.domain.cron import ALIASES, zone
from leasehold.domain.errors import Invalid
from leasehold.domain.job_filter import JobFilter

# `endpoints` has the functions of /v1/schedules. The pages call these functions, and `content_of` returns the JSON of
# their answers. `once` in a form is an idempotency key, with which a repeated press of a button does nothing.
router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(RUNS_READ))]
Writer = Annotated[Caller, Depends(SignedIn(RUNS_WRITE))]
#: A page of the list shows at most this many schedules, and the page of a schedule shows at most this many of its runs.
_PAGE, _RUNS = 50, 20
#: The format of a tick in the schedule's own time zone.
_IN_ZONE = "%a %Y-%m-%d %H:%M %Z"
#: If the person gives no end, a backfill ends this long before now. The workers may not have fired the ticks of the
#: last minute yet, and will still fire them.
_FIRED_AFTER = timedelta(minutes=1)
#: The fields of the form that changes a schedule. An empty field changes nothing.
_CHANGEABLE = ("cron", "timezone", "enabled", "overlap", "catch_up", "payload_template")


@router.get("/schedules")
@may_read_standby
async def show_schedules(request: Request, caller: Reader, cursor: IdCursor = None) -> Response:
    answer = content_of(await endpoints.list_schedules(request, caller, cursor, _PAGE))
    schedules = [_with_words(schedule) for schedule in answer["schedules"]]
    return page(request, "schedules.html", schedules=schedules, next_cursor=answer["next_cursor"], cursor=cursor)


@router.get("/schedules/{schedule_id}")
async def show_schedule(request: Request, schedule_id: UUID, caller: Reader) -> Response:
    schedule = content_of(await endpoints.get_schedule(request, schedule_id, caller))
    runs: list[dict[str, Any]] = []
    if JOBS_READ in caller.scopes:
        job_page = await list_page(
            services_of(request), caller, JobFilter(schedule=schedule_id), None, _RUNS, count=False
        )
        runs = job_page["jobs"]
    return page(
        request,
        "schedule.html",
        refresh_seconds=5,
        refresh_url=request.url.path,
        schedule=_with_words(schedule),
        runs=runs,
        once=form_idempotency_key(request, "run-now", str(schedule_id)),
    )


def _with_words(schedule: dict[str, Any]) -> dict[str, Any]:
    """The schedule with two more members. `words`: its cron expression in words. `firings`: its next ticks, each with a
    text in the schedule's own time zone.
    """
    instants = [datetime.fromisoformat(text) for text in schedule["next_runs"]]
    # If this release does not know the schedule's zone, there are no next ticks, and `zone` would raise an error. So
    # the zone is looked up only if there are ticks.
    own_zone = zone(schedule["timezone"]) if instants else UTC
    return schedule | {
        "words": in_words(schedule["cron"]),
        "firings": [(instant, instant.astimezone(own_zone).strftime(_IN_ZONE)) for instant in instants],
    }


def in_words(cron: str) -> str:
    """The expression in words. An expression that is no longer valid is returned unchanged."""
    try:
        return str(CronSim(ALIASES.get(cron.strip(), cron), datetime.now(UTC)).explain())
    except CronSimError:
        return cron


@router.post("/schedules/{schedule_id}/run-now")
async def run_now(request: Request, schedule_id: UUID, caller: Writer, form: Fields) -> Response:
    """Start a run. A form starts only one run, even if its button is pressed several times."""
    response = await endpoints.run_now(request, schedule_id, caller, form.get("once") or None)
    job_id = content_of(response)["id"]
    path = f"/jobs/{job_id}" if JOBS_READ in caller.scopes else f"/schedules/{schedule_id}"
    return go_to(request, path, "The schedule has started this run.")


#: A time as a person types it.
TypedTime = Annotated[str, Query(max_length=40)]


@router.get("/schedules/{schedule_id}/backfill")
async def preview_backfill(
    request: Request, schedule_id: UUID, caller: Writer, start: TypedTime = "", end: TypedTime = ""
) -> Response:
    """Show which ticks of a past range would start a run. This changes nothing."""
    schedule = content_of(await endpoints.get_schedule(request, schedule_id, caller))
    body = _range_of(start, end, dry_run=True)
    answer = content_of(await endpoints.backfill(request, schedule_id, body, caller))
    own_zone = zone(schedule["timezone"])
    ticks = [datetime.fromisoformat(text) for text in answer["without_run"]]
    return page(
        request,
        "schedule_backfill.html",
        schedule=schedule,
        preview=answer,
        ticks=[(tick, tick.astimezone(own_zone).strftime(_IN_ZONE)) for tick in ticks],
        start=body.start.isoformat(),
        end=body.end.isoformat(),
        once=form_idempotency_key(request, "backfill", str(schedule_id), body.start.isoformat(), body.end.isoformat()),
    )


@router.post("/schedules/{schedule_id}/backfill")
async def backfill(request: Request, schedule_id: UUID, caller: Writer, form: Fields) -> Response:
    """Start the runs. A form starts them only once, even if its button is pressed several times."""
    body = _range_of(form.get("start", ""), form.get("end", ""))
    response = await endpoints.backfill(request, schedule_id, body, caller, form.get("once") or None)
    n = len(content_of(response)["runs"])
    sentence = f"{n} {'run has' if n == 1 else 'runs have'} started."
    return go_to(request, f"/schedules/{schedule_id}", sentence if n else "No run has started.", good=bool(n))


def _range_of(start: str, end: str, *, dry_run: bool = False) -> endpoints.Backfill:
    """The request for a backfill of this range. `dry_run`: the backfill starts no run. Raises Invalid."""
    first_instant, last_instant = typed_instant(start), typed_instant(end)
    if first_instant is None:
        raise Invalid("invalid_request", "The range needs a start: 2026-11-22, or 2026-11-22T14:30.")
    return endpoints.Backfill(
        start=first_instant, end=last_instant or datetime.now(UTC) - _FIRED_AFTER, dry_run=dry_run
    )


@router.post("/schedules/{schedule_id}/change")
async def change(request: Request, schedule_id: UUID, caller: Writer, form: Fields) -> Response:
    changes: dict[str, Any] = {name: form[name].strip() for name in _CHANGEABLE if form.get(name, "").strip()}
    enabled = changes.get("enabled")
    if enabled is not None:
        if enabled not in ("true", "false"):
            raise Invalid("invalid_request", "`enabled` must be true or false.")
        changes["enabled"] = enabled == "true"
    if "payload_template" in changes:
        changes["payload_template"] = typed_json(request, changes["payload_template"])
    try:
        body = endpoints.Changes(**changes)
    except ValidationError as error:
        raise form_error(error, "The schedule") from None
    await endpoints.change_schedule(request, schedule_id, body, caller)
    sentences = {"true": "The schedule goes on.", "false": "The schedule is paused."}
    return go_to(request, f"/schedules/{schedule_id}", sentences.get(enabled or "", "The schedule is changed."))
