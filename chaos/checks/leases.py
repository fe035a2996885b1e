"""Checks leases: each has one owner, each claim has its epoch, and a worker that lost a task writes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import Seen, seen
from chaos.history import Claim, History, Row

#: How far the two clocks' readings of one order of events may be apart: it is the same clock.
_CLOCK = 0.005


def i5(history: History) -> Iterator[Seen]:
    """The epoch rises by exactly 1 per claim, and no two claims share one."""
    for task, claims in history.claims.items():
        for nth, claim in enumerate(claims, 1):
            sentence = f"{history.name_of(task)} was claimed with epoch {claim.epoch} by its claim number {nth}"
            yield seen("claim", sentence, good=claim.epoch == nth)
    suspended = {
        (change.xact, (change.before or {})["lease_owner"])
        for changes in history.task_changes.values()
        for change in changes
        if change.moved() == ("running", "waiting")
    }
    for task, claims in history.claims.items():
        if not claims[0].before:
            sentence = f"{history.name_of(task)} was made with a lease, by none who suspended its workflow"
            is_good = (history.task_changes[task][0].xact, claims[0].owner) in suspended
            yield seen("claim by a suspension", sentence, good=is_good)
    for row in history.tasks:
        count = len(history.claims.get(row["id"], ()))
        sentence = f"{history.name_of(row['id'])} has epoch {row['epoch']} after {count} claims"
        yield seen("step", sentence, good=row["epoch"] == count)


def i6(history: History) -> Iterator[Seen]:
    """No committed write carries an epoch lower than the row's: only the holder settles, once its handler has ended."""
    ended: dict[tuple[str, int], list[float]] = {}
    yield from _stale_results(history)
    for run in history.handler_runs:
        if run.claim is not None and run.end is not None:
            ended.setdefault((run.task, run.claim.epoch), []).append(run.end)
    for task, changes in history.task_changes.items():
        by_epoch = {claim.epoch: claim for claim in history.claims.get(task, ())}
        for change in changes:
            before, after = change.before, change.after
            if not before or not after:
                continue
            sentence = f"{history.name_of(task)} went back from epoch {before['epoch']} to {after['epoch']}"
            yield seen("write", sentence, good=after["epoch"] >= before["epoch"])
            if _is_settlement(before, after):
                yield _by_its_claimer(history, change, by_epoch.get(before["epoch"]))
            if _completes(before, after) and _is_inline(history, after):
                ends = ended.get((task, before["epoch"]), [])
                sentence = (
                    f"{history.name_of(task)} was completed at epoch {before['epoch']} by {change.process} although"
                    " the handler that ran at this epoch had not ended"
                )
                yield seen("completion", sentence, good=any(end <= change.at + _CLOCK for end in ends))


def _stale_results(history: History) -> Iterator[Seen]:
    """What was committed must come from the run that belongs to the epoch of the commit."""
    runs = {run.id: run for run in history.handler_runs}
    for result in history.results:
        run, task = runs.get(result["value"].get("run", "")), history.task_by_id.get(result["task_id"])
        if run is not None and run.claim is not None and task is not None:
            sentence = (
                f"{history.name_of(run.task)} was committed at epoch {task['epoch']} with the result of the run that"
                f" belonged to epoch {run.claim.epoch}"
            )
            yield seen("result", sentence, good=run.claim.epoch == task["epoch"])


def _by_its_claimer(history: History, change: Change, claim: Claim | None) -> Seen:
    name, status = history.name_of(change.row["id"]), change.row["status"]
    if claim is None:
        return Seen("settlement", f"{name} was made {status} by {change.process}, and nobody had claimed it")
    sentence = f"{name} was made {status} by {change.process} while epoch {claim.epoch} was {claim.process}'s"
    return seen("settlement", sentence, good=change.process == claim.process)


def _completes(before: Row, after: Row) -> bool:
    return bool(before["status"] != "succeeded" and after["status"] == "succeeded")


def _is_settlement(before: Row, after: Row) -> bool:
    """A write that needs the lease; what time ends (a loss, a job's end) does not."""
    if before["status"] != "running" or after["status"] in ("running", "cancelled"):
        return False
    return bool(after["losses"] == before["losses"])


def _is_inline(history: History, task: Row) -> bool:
    job = history.job_by_id.get(task["job_id"])
    return job is not None and (job["pipeline"], task["step"]) in history.terms.inline


def i7(history: History) -> Iterator[Seen]:
    """No task stays RUNNING for long after its lease has passed."""
    for overdue in history.overdue:
        yield seen("look at leases", "; ".join(overdue), good=not overdue)
    for task in history.tasks:
        yield seen("step at rest", f"{history.name_of(task['id'])} is running", good=task["status"] != "running")
