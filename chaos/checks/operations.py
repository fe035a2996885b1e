"""Checks the journals of workflows, and bulk operations (I25, I26)."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import Observation, observed
from chaos.history import REPLAYED, History, Operation, Row

#: Action -> the kind of event that it writes. A cancel writes one for each job, a retry one for each step that runs
#: again.
_EVENTS = {"retry": "replayed", "cancel": "cancel_requested"}


def i25(history: History) -> Iterator[Observation]:
    """Each call of a workflow has one row, written by the holder of its lease, and a result never changes."""
    for change in history.changes:
        if change.of != "call" or change.after is None:
            continue
        name = f"the call {change.after['branch']}/{change.after['number']} of workflow {change.after['job_id']}"
        if change.before is not None and change.before["state"] != "open":
            yield observed("result of a call", f"{name} was {change.before} and became {change.after}", good=False)
        elif change.before is not None:
            yield Observation("result of a call")
        held = _lease_at(history, change)
        sentence = f"{name} was written under epoch {change.after['epoch']}, while the lease was {held or 'free'}"
        yield observed("call", sentence, good=held == f"epoch {change.after['epoch']}")


def _lease_at(history: History, change: Change) -> str:
    """The lease of the workflow's own task when the row of the call was written; "": nobody held it.

    The statement that suspends a workflow writes the call and gives the lease back. So of a change by the same
    transaction, the row before the change counts.
    """
    row: Row | None = None
    for task in history.tasks_of.get(change.row["job_id"], ()):
        if task["contained"]:
            continue
        for other in history.task_changes.get(task["id"], ()):
            if other.xact == change.xact:
                row = other.before
                break
            if other.n > change.n:
                break
            row = other.after
    return f"epoch {row['epoch']}" if row is not None and row["status"] == "running" else ""


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
