"""Judges I26: a bulk operation acts once on each of its jobs, and its result counts them."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Operation, Row
from chaos.history import REPLAYED, History
from chaos.row_changes import seconds


def i26(history: History) -> Iterator[Observation]:
    """A bulk operation acts on each of its jobs once, and its result counts them."""
    for operation in history.operations:
        jobs = [job for job in history.jobs if _is_job_of(job, operation)]
        sentence = f"the operation with key {operation.key} of {operation.tenant} was made {len(jobs)} times"
        yield observed("operation", sentence, good=len(jobs) <= 1)
        if len(jobs) != 1 or jobs[0]["status"] != "succeeded":
            continue
        targets = history.tagged.get(operation.key, [])
        times_by_job = {job: _times_acted_on(history, operation, job) for job in targets}
        for job, times in times_by_job.items():
            sentence = f"the {operation.action} of {operation.key} acted {times} times on {job}"
            minimum = int(_must_be_acted_on(history, operation, jobs[0], job))
            yield observed("target", sentence, good=minimum <= times <= 1)
        value = history.value_of(jobs[0]["id"])
        total = sum(times_by_job.values())
        sentence = f"the {operation.action} of {operation.key} says {value}, and acted on {times_by_job}"
        yield observed("result of an operation", sentence, good=(value or {}).get("acted") == total)


def _is_job_of(job: Row, operation: Operation) -> bool:
    return (
        job["pipeline"] == "bulk_operation"
        and job["tenant_id"] == operation.tenant
        and str(job["params"]["filter"]).endswith(f":{operation.key}")
    )


def _times_acted_on(history: History, operation: Operation, job: str) -> int:
    """How often a cancel asked the job to end, or a retry replayed it."""
    if operation.action == "cancel":
        return sum(event["kind"] == "cancel_requested" for event in history.events_of.get(job, ()))
    return sum(
        change.kind == "job" and change.row["id"] == job and change.moved() in REPLAYED for change in history.changes
    )


def _must_be_acted_on(history: History, operation: Operation, job_of_operation: Row, job: str) -> bool:
    """Whether the operation must have acted on the job. A retry must, if the run had failed before the request. A
    cancel need not: the job may have ended before. But a job that is cancelled was cancelled by it.
    """
    if operation.action == "retry":
        return job in operation.targets and not _is_younger(history, job_of_operation, job)
    return bool(history.job_by_id[job]["status"] == "cancelled")


def _is_younger(history: History, job_of_operation: Row, job: str) -> bool:
    """Whether the job was made, or failed, after the operation's submission by the database's clock, although it failed
    before: the clock has jumped back in between. A retry leaves out such jobs.
    """
    if not history.jumps:
        return False
    failure = next(
        change.row
        for change in history.changes
        if change.kind == "job" and change.row["id"] == job and (change.moved() or ("", ""))[1] == "failed"
    )
    submitted = seconds(job_of_operation["params"]["at"])
    return max(seconds(failure["created_at"]), seconds(failure["finished_at"])) > submitted
