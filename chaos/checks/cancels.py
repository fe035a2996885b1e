"""Checks cancels: a job that waits ends at once, and a job that runs is requested to stop."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import Seen, seen
from chaos.history import History

#: An answer is later than its commit; the audit's moment is a little earlier than it.
_CLOCK = 0.005
#: As for I7: so long may it take until another worker is the sweeper, when the one that was stands still.
_SWEEPER_SECONDS = 10.0


def i15(history: History) -> Iterator[Seen]:
    """After a cancel no step starts, nothing is committed if it was at once, and the job ends in lease and grace."""
    for cancel in history.requests:
        if cancel.kind == "cancel" and cancel.answer == "accepted":
            violations = [
                *_begun_after(history, cancel.job, cancel.answered_at),
                *_committed_after(history, cancel.job, cancel.answered_at),
            ]
            yield seen("cancelled job", "; ".join(violations), good=not violations)
        if cancel.kind == "cancel" and cancel.answer == "stopping":
            violations = [*_begun_after(history, cancel.job, cancel.answered_at, may_undo=True)]
            yield seen("answered while it ran", "; ".join(violations), good=not violations)
    for change in history.changes:
        if change.of == "job" and (change.moved() or ("", ""))[1] == "cancel_requested":
            violations = [*_not_stopped(history, change)]
            yield seen("running job", "; ".join(violations), good=not violations)


def _not_stopped(history: History, request: Change) -> Iterator[str]:
    job = request.row
    yield from _begun_after(history, job["id"], request.at + _CLOCK, may_undo=True)
    allowed_seconds = history.terms.lease_seconds + job["grace_seconds"]
    ended = history.ended_at.get(job["id"])
    if ended is None:
        yield f"{job['pipeline']} {job['id']} was asked to stop and has not ended"
    elif (
        ended - request.at - history.silence(request.at, ended)
        > allowed_seconds + history.terms.sweep_seconds + _SWEEPER_SECONDS
    ):
        lateness = (
            f"{ended - request.at:.1f} s after it was asked to stop, {allowed_seconds:.0f} s and a sweep are allowed"
        )
        yield f"{job['pipeline']} {job['id']} ended {lateness}"
    for run in history.handler_runs:
        task = history.task_by_id.get(run.task)
        if task is None or task["job_id"] != job["id"] or not task["cancelable"] or run.begin > request.at:
            continue
        # The heartbeat hears of the cancel, and the handler is ended after the grace. If the heartbeat hears nothing,
        # the trust in the lease ends.
        seconds = history.worked(run.process, request.at, run.last)
        if seconds > allowed_seconds:
            yield f"{history.name_of(run.task)} worked on for {seconds:.1f} s after its job was asked to stop"


def _begun_after(history: History, job: str, moment: float, *, may_undo: bool = False) -> Iterator[str]:
    """`may_undo`: a workflow that has called something is claimed to see the cancel, and undoes its work."""
    for task in history.tasks_of.get(job, ()):
        if may_undo and task["journaled"]:
            continue
        if any(claim.at > moment for claim in history.claims.get(task["id"], ())):
            yield f"{history.name_of(task['id'])} started after its job was cancelled"


def _committed_after(history: History, job: str, moment: float) -> Iterator[str]:
    for task in history.tasks_of.get(job, ()):
        for change in history.task_changes.get(task["id"], ()):
            if change.at > moment and (change.moved() or ("", ""))[1] == "succeeded":
                yield f"{history.name_of(task['id'])} was committed after its job was cancelled"
