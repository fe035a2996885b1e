"""The pages of schedules: when they fire, the runs that they started, and why they paused.

A person starts a run now, pauses and resumes a schedule, and changes its cron expression and time zone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

from cronsim import CronSim, CronSimError
from fastapi import APIRouter, Depends, Request, Response
from pydantic import ValidationError

from leasehold.api.auth.security import JOBS_READ, RUNS_READ, RUNS_WRITE
from leasehold.api.console.rendering import content_of, go_to, once_of, page
from leasehold.api.console.routes import Fields
from leasehold.api.console.session import SignedIn
from leasehold.api.http.cursors import IdCursor
from leasehold.api.jobs.lists import listed
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import services_of
from leasehold.api.runs import schedules as endpoints
from leasehold.domain.cron import ALIASES, zone
from leasehold.domain.errors import Invalid
from leasehold.domain.job_filter import JobFilter

router = APIRouter()
Reader = Annotated[Caller, Depends(SignedIn(RUNS_READ))]
Writer = Annotated[Caller, Depends(SignedIn(RUNS_WRITE))]
_PAGE, _RUNS = 50, 20


@router.get("/schedules")
async def show_schedules(request: Request, caller: Reader, cursor: IdCursor = None) -> Response:
    answer = content_of(await endpoints.list_schedules(request, caller, cursor, _PAGE))
    schedules = [_shown(schedule) for schedule in answer["schedules"]]
    return page(request, "schedules.html", schedules=schedules, next_cursor=answer["next_cursor"], cursor=cursor)


@router.get("/schedules/{schedule_id}")
async def show_schedule(request: Request, schedule_id: UUID, caller: Reader) -> Response:
    schedule = content_of(await endpoints.get_schedule(request, schedule_id, caller))
    runs: list[dict[str, Any]] = []
    if JOBS_READ in caller.scopes:
        job_page = await listed(services_of(request), caller, JobFilter(schedule=schedule_id), None, _RUNS, count=False)
        runs = job_page["jobs"]
    return page(
        request,
        "schedule.html",
        live=5,
        live_url=request.url.path,
        schedule=_shown(schedule),
        runs=runs,
        once=once_of(request, "run-now", str(schedule_id)),
    )


def _shown(schedule: dict[str, Any]) -> dict[str, Any]:
    """The schedule, with its cron expression in words and its next firings also in its own time zone."""
    instants = [datetime.fromisoformat(text) for text in schedule["next_runs"]]
    # A schedule whose zone this release does not know has no next firings, and needs no zone.
    own_zone = zone(schedule["timezone"]) if instants else UTC
    return schedule | {
        "words": in_words(schedule["cron"]),
        "firings": [(instant, instant.astimezone(own_zone).strftime("%a %Y-%m-%d %H:%M %Z")) for instant in instants],
    }


def in_words(cron: str) -> str:
    """The expression in words; the expression itself where it has become invalid."""
    try:
        return str(CronSim(ALIASES.get(cron.strip(), cron), datetime.now(UTC)).explain())
    except CronSimError:
        return cron


@router.post("/schedules/{schedule_id}/run-now")
async def run_now(request: Request, schedule_id: UUID, caller: Writer, form: Fields) -> Response:
    """A form starts one run, however often its button is pressed."""
    response = await endpoints.run_now(request, schedule_id, caller, form.get("once") or None)
    job_id = content_of(response)["id"]
    to = f"/jobs/{job_id}" if JOBS_READ in caller.scopes else f"/schedules/{schedule_id}"
    return go_to(request, to, "The schedule has started this run.")


@router.post("/schedules/{schedule_id}/change")
async def change(request: Request, schedule_id: UUID, caller: Writer, form: Fields) -> Response:
    typed = {name: form[name].strip() for name in ("cron", "timezone", "enabled") if form.get(name, "").strip()}
    if "enabled" in typed and typed["enabled"] not in ("true", "false"):
        raise Invalid("invalid_request", "A schedule is enabled or not.")
    changes: dict[str, Any] = dict(typed)
    if "enabled" in typed:
        changes["enabled"] = typed["enabled"] == "true"
    try:
        body = endpoints.Changes(**changes)
    except ValidationError as error:
        raise Invalid("invalid_request", f"The schedule cannot be changed so: {error.errors()[0]['msg']}.") from None
    await endpoints.change_schedule(request, schedule_id, body, caller)
    sentences = {"true": "The schedule goes on.", "false": "The schedule is paused."}
    sentence = sentences.get(typed.get("enabled", ""), "The schedule is changed.")
    return go_to(request, f"/schedules/{schedule_id}", sentence)
