"""Checks the promise to a client (I1, I17): an accepted job exists, ends, and succeeds unless its work cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History, Request, Row
from leasehold.domain.states import JOB_TERMINAL

#: Kind of job that is made to fail -> the code of its failure. None: any code.
MADE_TO_FAIL = {"hopeless": "not_now", "wrong": "refused", "poison": None, "broken": "broken"}
#: Kinds of requests that make no job.
JOBLESS = {"upload", "schedule", "limit", "webhook", "template", "replayed"}
#: Codes of failures that the faults cause and the step's own work does not: a good job may fail with one of them once
#: its attempts are used up.
_SURROUNDINGS = {"worker_lost", "store_unavailable", "input_corrupt", "disk_full"}
#: The code of a generation whose order may or may not have reached the provider: ordering again might buy twice.
_UNKNOWN_OUTCOME = "submit_outcome_unknown"
_CAUSES = ("error", "timeout", "crash", "loss")


def i1(history: History) -> Iterator[Observation]:
    """Every accepted job has a row and reaches a terminal state; work that can succeed is not given up."""
    for request in history.requests:
        if request.answer != "accepted" or request.kind in JOBLESS:
            continue
        if request.kind == "scheduled":
            yield from _of_schedule(history, request)
            continue
        for job_id in {request.job, *(name for answer in request.answers for name in answer)}:
            yield Observation("accepted job", _wrong_with(history, request, job_id))
    known = {name for request in history.requests for answer in request.answers for name in answer}
    known |= {request.job for request in history.requests} | {run["job_id"] for run in history.firings}
    for job in history.jobs:
        if job["id"] not in known:
            sentence = f"{job['pipeline']} {job['id']}, whose client got no answer, is still {job['status']}"
            yield observed("job without an answer", sentence, good=job["status"] in JOB_TERMINAL)


def _wrong_with(history: History, request: Request, job_id: str) -> str:
    """The evidence against a job of an accepted request; "" if the job ended as it must."""
    job = history.job_by_id.get(job_id)
    name = f"{request.kind} {job_id}"
    if job is None:
        return f"{name} was accepted and has no row"
    if job["status"] not in JOB_TERMINAL:
        return f"{name} is still {job['status']} {history.rest_seconds:.0f} s after the faults"
    if job["status"] != "succeeded" and request.kind not in MADE_TO_FAIL and not excused(history, job):
        return f"{name} ended {job['status']}: {job['error']}"
    return ""


def _of_schedule(history: History, request: Request) -> Iterator[Observation]:
    """A schedule of the load has one tick: it made one run, which succeeded."""
    made = history.runs_of.get(request.key, [])
    yield observed("schedule", f"the schedule {request.key} made no run", good=bool(made))
    for job in (history.job_by_id[run] for run in made):
        sentence = f"the run {job['id']} of schedule {request.key} is {job['status']}: {job['error']}"
        yield observed("schedule", sentence, good=job["status"] == "succeeded" or excused(history, job))


def excused(history: History, job: Row) -> bool:
    """Whether the job may have ended without success: a client cancelled it, or the faults used up its attempts."""
    if job["status"] == "cancelled":
        by_client = any(request.kind == "cancel" and request.job == job["id"] for request in history.requests)
        return by_client or job["id"] in history.cancelled_in_bulk
    code = (job["error"] or {}).get("code")
    if code == _UNKNOWN_OUTCOME and job["pipeline"] == "generation":
        return True
    failed = [task for task in history.tasks if task["job_id"] == job["id"] and task["status"] == "failed"]
    used_up = all(
        task["errors"] >= task["max_attempts"] or task["losses"] > history.terms.max_losses for task in failed
    )
    crashed = all(task["crashes"] >= history.terms.max_crashes for task in failed)
    return bool(failed) and (
        (used_up and code in _SURROUNDINGS) or (crashed and history.children_killed >= history.terms.max_crashes)
    )


def i17(history: History) -> Iterator[Observation]:
    """Attempts never exceed the maximum; poison ends FAILED with a cause; kinds of failure are counted apart."""
    causes = Counter((failure["task_id"], failure["cause"]) for failure in history.failures)
    for task in history.tasks:
        wrong = [*_over_limits(history, task)]
        for cause, counted in (("crash", task["crashes"]), ("error", task["errors"])):
            recorded = causes[task["id"], cause] + (causes[task["id"], "timeout"] if cause == "error" else 0)
            counted_in_all = counted + _earlier(history, task, "crashes" if cause == "crash" else "errors")
            if recorded != counted_in_all:
                wrong.append(
                    f"{history.name_of(task['id'])} counted {counted_in_all} of {cause}, its failures say {recorded}"
                )
        if task["status"] == "failed" and not any(causes[task["id"], cause] for cause in _CAUSES):
            wrong.append(f"{history.name_of(task['id'])} failed without a cause")
        yield observed("step", "; ".join(wrong), good=not wrong)
    for job in history.jobs:
        if job["pipeline"] in MADE_TO_FAIL and job["status"] in JOB_TERMINAL:
            yield Observation("job made to fail", _wrong_end(history, job))


def _earlier(history: History, task: Row, counter: str) -> int:
    """The sum of the step's counter before each replay of its job: a replay sets the counter back to zero."""
    changes = history.task_changes.get(task["id"], ())
    drops = (change.before[counter] - change.after[counter] for change in changes if change.before and change.after)
    return sum(drop for drop in drops if drop > 0)


def _over_limits(history: History, task: Row) -> Iterator[str]:
    limits = (
        ("errors", task["max_attempts"]), ("crashes", history.terms.max_crashes),
        ("losses", history.terms.max_losses + 1),
    )  # fmt: skip
    for counter, allowed in limits:
        if task[counter] > allowed:
            yield f"{history.name_of(task['id'])} has {task[counter]} {counter}, {allowed} are allowed"


def _wrong_end(history: History, job: Row) -> str:
    """The evidence against the end of a job that cannot succeed; "" if it failed as it must."""
    if job["status"] != "failed":
        return f"{job['pipeline']} {job['id']} cannot succeed, and ended {job['status']}"
    expected_code = MADE_TO_FAIL[job["pipeline"]]
    if expected_code is not None and (job["error"] or {}).get("code") != expected_code and not excused(history, job):
        return f"{job['pipeline']} {job['id']} failed by {job['error']} instead of {expected_code}"
    return ""
