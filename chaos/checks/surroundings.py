"""Checks schedules, webhooks, tenants, and that a run leaves nothing behind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from http import HTTPStatus

from chaos.checks.verdict import Seen, seen
from chaos.history import History
from leasehold.domain.states import JOB_TERMINAL


def i18(history: History) -> Iterator[Seen]:
    """At most one run per schedule and tick; each schedule of the load has one tick."""
    for schedule, made in history.runs_of.items():
        yield seen("tick", f"one tick of schedule {schedule} made {len(made)} runs", good=len(made) == 1)


def i19(history: History) -> Iterator[Seen]:
    """At least one webhook per subscribed terminal event, genuine, with one webhook-id over its retries."""
    runs = {run["job_id"] for run in history.run_rows if run["tenant_id"] in history.subscribers} - history.revived
    heard = defaultdict(list)
    for delivery in history.deliveries:
        heard[delivery.run].append(delivery)
        sentence = f"the message {delivery.message} of run {delivery.run} is signed wrongly"
        yield seen("message", sentence, good=delivery.genuine)
    for run in sorted(runs):
        job = history.job_by_id.get(run)
        if job is None or job["status"] not in JOB_TERMINAL:
            continue
        taken = any(delivery.taken for delivery in heard[run])
        yield seen("end of a run", f"no webhook told that run {run} {job['status']}", good=taken)
        ids = {delivery.message for delivery in heard[run]}
        yield seen("end of a run", f"run {run} was told of under more than one webhook-id", good=len(ids) <= 1)
        for each in heard[run]:
            sentence = (
                f"{each.tenant} was told {each.event} of {job['tenant_id']}'s run {run}, which is {job['status']}"
            )
            true = (each.tenant, each.event) == (job["tenant_id"], f"run.{job['status']}")
            yield seen("message", sentence, good=true)


def i21(history: History) -> Iterator[Seen]:
    """The tenant is the same in a job and in all its rows, and no endpoint shows another tenant's thing of any kind."""
    rows = {
        "task": history.tasks, "event": history.events, "media": history.media, "output": history.outputs,
        "run": history.run_rows, "conversion": history.conversions, "generation": history.generations,
    }  # fmt: skip
    for kind, found in rows.items():
        for row in found:
            job = history.job_by_id.get(row["job_id"] or "")
            if job is not None:
                sentence = f"job {job['id']} is {job['tenant_id']}'s and has a {kind} of {row['tenant_id']}"
                yield seen(kind, sentence, good=row["tenant_id"] == job["tenant_id"])
    for kind, asked, status in history.probes:
        yield seen(f"foreign {kind}", f"{asked} was answered with {status}", good=status == HTTPStatus.NOT_FOUND)


def i24(history: History) -> Iterator[Seen]:
    """Afterwards there is no orphaned process, directory, lock or open transaction."""
    for what, left in history.leftovers:
        yield seen(what, "; ".join(left), good=not left)
