"""Tenants, limits, and what is left behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus

from chaos.checks.verdict import NotApplicable
from chaos.history import History
from leasehold.domain.states import JOB_TERMINAL


def i18(history: History) -> Iterator[str]:
    """At most one run per schedule and tick; each schedule of the load has one tick."""
    if not any(request.kind == "scheduled" for request in history.requests):
        raise NotApplicable("the load has no schedules")
    for schedule, made in history.runs_of.items():
        if len(made) > 1:
            yield f"one tick of schedule {schedule} made {len(made)} runs"


def i19(history: History) -> Iterator[str]:
    """At least one webhook per subscribed terminal event, genuine, with one webhook-id over its retries."""
    runs = {run["job_id"] for run in history.firings}
    if not runs:
        raise NotApplicable("no run ended of which a webhook could tell")
    heard = defaultdict(list)
    for delivery in history.deliveries:
        heard[delivery.run].append(delivery)
        if not delivery.genuine:
            yield f"the message {delivery.message} of run {delivery.run} is signed wrongly"
    for run in sorted(runs):
        job = history.job_by_id[run]
        if job["status"] not in JOB_TERMINAL:
            continue
        if not any(delivery.taken for delivery in heard[run]):
            yield f"nobody was told that run {run} {job['status']}"
        if len({delivery.message for delivery in heard[run]}) > 1:
            yield f"run {run} was told of under more than one webhook-id"
        wrong = {(each.tenant, each.event) for each in heard[run]} - {(job["tenant_id"], f"run.{job['status']}")}
        for tenant, event in sorted(wrong):
            yield f"{tenant} was told {event} of {job['tenant_id']}'s run {run}, which is {job['status']}"


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
