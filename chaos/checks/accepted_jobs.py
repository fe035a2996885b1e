"""Judges I1: an accepted job has a row, reaches a final state, and succeeds if its work can succeed."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.excuses import MADE_TO_FAIL, excused
from chaos.checks.verdict import Observation, observed
from chaos.evidence import Request
from chaos.history import History
from leasehold.domain.states import JOB_TERMINAL

#: Kinds of requests that make no job.
JOBLESS = {"upload", "schedule", "limit", "webhook", "template", "replayed", "errand"}


def i1(history: History) -> Iterator[Observation]:
    """Every accepted job has a row and reaches a terminal state; work that can succeed is not given up."""
    for request in history.requests:
        if request.answer != "accepted" or request.kind in JOBLESS:
            continue
        if request.kind == "scheduled":
            yield from _check_schedule(history, request)
            continue
        for job_id in {request.job, *(job_id for answer in request.answers for job_id in answer)}:
            yield Observation("accepted job", _evidence_against(history, request, job_id))
    known_ids = {job_id for request in history.requests for answer in request.answers for job_id in answer}
    known_ids |= {request.job for request in history.requests} | {run["job_id"] for run in history.firings}
    for job in history.jobs:
        if job["id"] not in known_ids:
            sentence = f"{job['pipeline']} {job['id']}, whose client got no answer, is still {job['status']}"
            yield observed("job without an answer", sentence, good=job["status"] in JOB_TERMINAL)


def _evidence_against(history: History, request: Request, job_id: str) -> str:
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


def _check_schedule(history: History, request: Request) -> Iterator[Observation]:
    """Check a schedule of the load: its only tick made a run, and each of its runs succeeded."""
    runs = history.runs_of.get(request.key, [])
    yield observed("schedule", f"the schedule {request.key} made no run", good=bool(runs))
    for job in (history.job_by_id[run] for run in runs):
        sentence = f"the run {job['id']} of schedule {request.key} is {job['status']}: {job['error']}"
        yield observed("schedule", sentence, good=job["status"] == "succeeded" or excused(history, job))
