"""Judges I19: a subscriber gets a signed message about the end of each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from chaos.checks.excuses import excused
from chaos.checks.verdict import Observation, observed
from chaos.history import History
from leasehold.domain.states import JOB_TERMINAL


def i19(history: History) -> Iterator[Observation]:
    """At least one webhook per subscribed terminal event, genuine, with one webhook-id over its retries."""
    runs = {run["job_id"] for run in history.run_rows if run["tenant_id"] in history.subscribers} - history.revived
    deliveries = defaultdict(list)
    for delivery in history.deliveries:
        deliveries[delivery.run].append(delivery)
        sentence = f"the message {delivery.message} of run {delivery.run} is signed wrongly"
        yield observed("message", sentence, good=delivery.genuine)
    failed_deliveries = defaultdict(list)
    for delivery_job in history.jobs:
        if delivery_job["pipeline"] == "webhook" and delivery_job["status"] == "failed":
            failed_deliveries[delivery_job["params"]["event"]["data"]["id"]].append(delivery_job)
    for run in sorted(runs):
        job = history.job_by_id.get(run)
        if job is None or job["status"] not in JOB_TERMINAL:
            continue
        is_accepted = any(delivery.taken for delivery in deliveries[run])
        if not is_accepted and any(excused(history, failed) for failed in failed_deliveries[run]):
            yield Observation("delivery that the faults used up")
        else:
            yield observed("end of a run", f"no webhook delivered that run {run} {job['status']}", good=is_accepted)
        ids = {delivery.message for delivery in deliveries[run]}
        yield observed("end of a run", f"the end of run {run} has more than one webhook-id", good=len(ids) <= 1)
        for delivery in deliveries[run]:
            sentence = (
                f"{delivery.tenant} got {delivery.event} for {job['tenant_id']}'s run {run}, which is {job['status']}"
            )
            is_true = (delivery.tenant, delivery.event) == (job["tenant_id"], f"run.{job['status']}")
            yield observed("message", sentence, good=is_true)
