"""Judges I26: a bulk operation acts once on each of its jobs, and its result counts them."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Operation, Row
from chaos.history import REPLAYED, History

#: Action -> the kind of event that it writes. A cancel writes one for each job, a retry one for each step that runs
#: again.
_EVENTS = {"retry": "replayed", "cancel": "cancel_requested"}


def i26(history: History) -> Iterator[Observation]:
    """A bulk operation acts on each of its jobs once, and its result counts them."""
    for operation in history.operations:
        made = [job for job in history.jobs if _is_of(job, operation)]
        sentence = f"the operation with key {operation.key} of {operation.tenant} was made {len(made)} times"
        yield observed("operation", sentence, good=len(made) <= 1)
        if len(made) != 1 or made[0]["status"] != "succeeded":
            continue
        targets = history.tagged.get(operation.key, [])
        acts = {job: _acts(history, operation, job) for job in targets}
        for job, times in acts.items():
            sentence = f"the {operation.action} of {operation.key} acted {times} times on {job}"
            minimum = int(_must_be_acted_on(history, operation, job))
            yield observed("target", sentence, good=minimum <= times <= 1)
        value = history.value_of(made[0]["id"])
        sentence = f"the {operation.action} of {operation.key} says {value}, and acted on {acts}"
        yield observed("result of an operation", sentence, good=(value or {}).get("acted") == sum(acts.values()))


def _is_of(job: Row, operation: Operation) -> bool:
    return (
        job["pipeline"] == "bulk_operation"
        and job["tenant_id"] == operation.tenant
        and str(job["params"]["filter"]).endswith(f":{operation.key}")
    )


def _acts(history: History, operation: Operation, job: str) -> int:
    """How often the job was replayed by a retry, or was asked to end by a cancel."""
    if operation.action == "cancel":
        return sum(event["kind"] == _EVENTS["cancel"] for event in history.events_of.get(job, ()))
    return sum(
        change.of == "job" and change.row["id"] == job and change.moved() in REPLAYED for change in history.changes
    )


def _must_be_acted_on(history: History, operation: Operation, job: str) -> bool:
    """Whether the operation must have acted on the job. A retry: if the run had failed before the request. A cancel:
    only if the job is cancelled, because the job may have ended before.
    """
    if operation.action == "retry":
        return job in operation.targets
    return bool(history.job_by_id[job]["status"] == "cancelled")
