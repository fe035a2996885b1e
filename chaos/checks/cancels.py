"""Judges I15: a cancel ends a job that waits, and asks a job that runs to stop. A workflow then undoes its work."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History
from chaos.pipelines import UNDO_CALL, UNDOING_WORKFLOW
from chaos.row_changes import Change

#: The triggers that record changes of rows read the clock a little before the commit. A claim within this time, in
#: seconds, is not late.
_CLOCK_DIFFERENCE = 0.005
#: If the worker that sweeps stands still, another one takes over within this time (as for I7).
_SWEEPER_SECONDS = 10.0


def i15(history: History) -> Iterator[Observation]:
    """After a cancel no step starts; the job ends within lease time plus grace, or at once without another commit."""
    for cancel in history.requests:
        if cancel.kind == "cancel" and cancel.answer == "accepted":  # the job was cancelled at once
            violations = [
                *_begun_after(history, cancel.job, cancel.answered_at),
                *_committed_after(history, cancel.job, cancel.answered_at),
            ]
            yield observed("cancelled job", "; ".join(violations), good=not violations)
        if cancel.kind == "cancel" and cancel.answer == "stopping":
            violations = [*_begun_after(history, cancel.job, cancel.answered_at, may_undo=True)]
            yield observed("answered while it ran", "; ".join(violations), good=not violations)
    for change in history.changes:
        if change.kind == "job" and (change.moved() or ("", ""))[1] == "cancel_requested":
            violations = [*_not_stopped(history, change)]
            was_starved = not violations and any(_not_stopped(history, change, allow_starvation=False))
            what = "running job, without a processor" if was_starved else "running job"
            yield observed(what, "; ".join(violations), good=not violations)
            if change.row["pipeline"] == UNDOING_WORKFLOW and _has_called(history, change):
                yield _undone(history, change.row["id"])


def _not_stopped(history: History, request: Change, *, allow_starvation: bool = True) -> Iterator[str]:
    """The evidence that the job did not stop as it must. `allow_starvation`: whether to allow for the time for
    which processes waited for a processor.
    """
    job = request.row
    yield from _begun_after(history, job["id"], request.at + _CLOCK_DIFFERENCE, may_undo=True)
    allowed_seconds = history.terms.lease_seconds + job["grace_seconds"]
    ended = history.ended_at.get(job["id"])
    if ended is None:
        yield f"{job['pipeline']} {job['id']} was asked to stop and has not ended"
    elif (
        ended - request.at - history.seconds_held_up(request.at, ended, allow_starvation=allow_starvation)
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
        # The worker learns of the request by a heartbeat, and ends the handler after the grace. If no heartbeat gets an
        # answer, the worker ends the handler when its trust in the lease ends.
        seconds = history.seconds_worked(run.process, request.at, run.last, allow_starvation=allow_starvation)
        if seconds > allowed_seconds:
            yield f"{history.name_of(run.task)} worked on for {seconds:.1f} s after its job was asked to stop"


def _begun_after(history: History, job: str, moment: float, *, may_undo: bool = False) -> Iterator[str]:
    """Evidence of the job's steps that began after the moment. `may_undo`: a workflow that has made a call may begin
    once more, so that it sees the cancel and undoes its work.
    """
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
    """Whether the workflow had made a call when its cancel was requested."""
    for task in history.tasks_of.get(request.row["id"], ()):
        before = [change for change in history.task_changes.get(task["id"], ()) if change.number < request.number]
        if not task["contained"] and before:  # a contained task is one that the workflow started
            return bool(before[-1].row.get("journaled"))
    return False


def _undone(history: History, job: str) -> Observation:
    """Check that a workflow that acknowledges its cancel has undone its work once. Exceptions: the grace passed, its
    workers were lost too often, its code had ended before it could see the cancel, or the release ended it.
    """
    status = history.job_by_id[job]["status"]
    undo_calls = [
        change.row for change in history.changes
        if change.kind == "call" and change.row["job_id"] == job
        and (change.row["name"], change.row["state"]) == (UNDO_CALL, "done")
    ]  # fmt: skip
    if status == "succeeded":
        sentence = f"workflow {job} undid its work and succeeded"
        return observed("workflow that did not see its cancel", sentence, good=not undo_calls)
    cancel_events = [event for event in history.events_of.get(job, ()) if event["kind"] == "cancelled"]
    reason = next((event["data"]["because"] for event in cancel_events if event["data"]), "")
    losses = max(task["losses"] for task in history.tasks_of[job])
    if reason == "the grace passed" or (reason and losses >= history.terms.max_losses):
        return Observation("workflow that was ended")
    if history.of_release and _ended_by_release(history, job):
        return Observation("workflow that the release's code ended")
    sentence = (
        f"workflow {job} ended {status} ({reason or 'acknowledged'}) and has undone its work {len(undo_calls)} times"
    )
    return observed("workflow that saw its cancel", sentence, good=status == "cancelled" and len(undo_calls) == 1)


def _ended_by_release(history: History, job: str) -> bool:
    """Whether code of the release has, or may have, cancelled the workflow's task: an API while the task waited, or one
    of the release's workers, which sweeps. The release's workflows undo nothing. No API of this code ends a task that
    waits, and runs without processes of the release judge that.
    """
    return any(
        moved[1] == "cancelled"
        and (change.process in history.of_release or (not change.process and moved[0] == "waiting"))
        for task in history.tasks_of.get(job, ())
        if not task["contained"]
        for change in history.task_changes.get(task["id"], ())
        if (moved := change.moved())
    )
