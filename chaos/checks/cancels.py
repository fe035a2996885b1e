"""Checks cancels: a job that waits ends at once, a job that runs is asked to stop, and a workflow undoes its work."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import Seen, seen
from chaos.history import History
from chaos.pipelines import PUT_BACK, TAKES_BACK

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
            if change.row["pipeline"] == TAKES_BACK and _has_called(history, change):
                yield _undone(history, change.row["id"])


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
        claims = [claim for claim in history.claims.get(task["id"], ()) if claim.at > moment]
        if any(not (may_undo and claim.before.get("journaled")) for claim in claims):
            yield f"{history.name_of(task['id'])} started after its job was cancelled"


def _committed_after(history: History, job: str, moment: float) -> Iterator[str]:
    for task in history.tasks_of.get(job, ()):
        for change in history.task_changes.get(task["id"], ()):
            if change.at > moment and (change.moved() or ("", ""))[1] == "succeeded":
                yield f"{history.name_of(task['id'])} was committed after its job was cancelled"


def _has_called(history: History, request: Change) -> bool:
    """Whether the workflow had called something when its cancel was requested."""
    for task in history.tasks_of.get(request.row["id"], ()):
        before = [change for change in history.task_changes.get(task["id"], ()) if change.n < request.n]
        if not task["contained"] and before:
            return bool(before[-1].row.get("journaled"))
    return False


def _undone(history: History, job: str) -> Seen:
    """A workflow that acknowledges its cancel has undone its work. Only the end of the grace, or too many lost workers,
    end it before; and a code that has come to its end does not hear of the cancel.
    """
    status = history.job_by_id[job]["status"]
    undone = [
        change.row for change in history.changes
        if change.of == "call" and change.row["job_id"] == job
        and (change.row["name"], change.row["state"]) == (PUT_BACK, "done")
    ]  # fmt: skip
    if status == "succeeded":
        return seen("workflow that did not hear", f"workflow {job} undid its work and succeeded", good=not undone)
    ends = [event for event in history.events_of.get(job, ()) if event["kind"] == "cancelled"]
    because = next((event["data"]["because"] for event in ends if event["data"]), "")
    losses = max(task["losses"] for task in history.tasks_of[job])
    if because == "the grace passed" or (because and losses >= history.terms.max_losses):
        return Seen("workflow that was ended")
    sentence = (
        f"workflow {job} ended {status} ({because or 'acknowledged'}) and has undone its work {len(undone)} times"
    )
    return seen("workflow that saw its cancel", sentence, good=status == "cancelled" and len(undone) == 1)
