"""Tenants, limits, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

from chaos.checks.verdict import NotApplicable
from chaos.history import History


def i18(history: History) -> Iterator[str]:
    """At most one run per schedule and tick; each schedule of the load has one tick."""
    if not any(request.kind == "scheduled" for request in history.requests):
        raise NotApplicable("the load has no schedules")
    for schedule, made in history.runs_of.items():
        if len(made) > 1:
            yield f"one tick of schedule {schedule} made {len(made)} runs"


def i19(_history: History) -> Iterator[str]:
    """At least one webhook per subscribed terminal event."""
    raise NotApplicable("the load subscribes to no webhooks")


def i21(history: History) -> Iterator[str]:
    """The tenant is the same in job, task, event and media, and another tenant's media cannot be seen."""
    for row in (*history.tasks, *history.events):
        job = history.job_by_id.get(row["job_id"])
        if job is not None and row["tenant_id"] != job["tenant_id"]:
            yield f"job {job['id']} is {job['tenant_id']}'s and has a row of {row['tenant_id']}"
    for media in history.media:
        job = history.job_by_id.get(media["job_id"] or "")
        if job is not None and media["tenant_id"] != job["tenant_id"]:
            yield f"media {media['id']} is {media['tenant_id']}'s, its job is {job['tenant_id']}'s"
    for asked, status in history.probes:
        if status != HTTPStatus.NOT_FOUND:
            yield f"{asked} was answered with {status}"


def i22(_history: History) -> Iterator[str]:
    """One provider request id per generation task."""
    raise NotApplicable("the load asks no provider")


def i23(_history: History) -> Iterator[str]:
    """Concurrency and rate limits are never exceeded."""
    raise NotApplicable("the load's pipelines declare no such limits")


def i24(history: History) -> Iterator[str]:
    """Afterwards there is no orphaned process, directory, lock or open transaction."""
    yield from history.leftovers
