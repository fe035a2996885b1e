"""Checks leases (I5 to I7): each has one owner and one epoch, and a worker that lost a task writes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.audit import Change
from chaos.checks.verdict import Observation, observed
from chaos.history import Claim, History, Row

#: The journal and the audit read one clock. Their times of two events in a row differ by at most this, in seconds.
_CLOCK = 0.005


def i5(history: History) -> Iterator[Observation]:
    """The epoch rises by exactly 1 per claim, and no two claims share one."""
    for task, claims in history.claims.items():
        for nth, claim in enumerate(claims, 1):
            sentence = f"{history.name_of(task)} was claimed with epoch {claim.epoch} by its claim number {nth}"
            yield observed("claim", sentence, good=claim.epoch == nth)
    suspended = {
        (change.xact, (change.before or {})["lease_owner"])
        for changes in history.task_changes.values()
        for change in changes
        if change.moved() == ("running", "waiting")
    }
    for task, claims in history.claims.items():
        if not claims[0].before:
            sentence = f"{history.name_of(task)} was made with a lease, and not by the suspension of its workflow"
            is_good = (history.task_changes[task][0].xact, claims[0].owner) in suspended
            yield observed("claim by a suspension", sentence, good=is_good)
    for row in history.tasks:
        count = len(history.claims.get(row["id"], ()))
        sentence = f"{history.name_of(row['id'])} has epoch {row['epoch']} after {count} claims"
        yield observed("step", sentence, good=row["epoch"] == count)


def i6(history: History) -> Iterator[Observation]:
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
            yield observed("write", sentence, good=after["epoch"] >= before["epoch"])
            if _is_settlement(before, after):
                yield _by_its_claimer(history, change, by_epoch.get(before["epoch"]))
            if _completes(before, after) and _is_inline(history, after):
                ends = ended.get((task, before["epoch"]), [])
                sentence = (
                    f"{history.name_of(task)} was completed at epoch {before['epoch']} by {change.process} although"
                    " the handler that ran at this epoch had not ended"
                )
                yield observed("completion", sentence, good=any(end <= change.at + _CLOCK for end in ends))


def _stale_results(history: History) -> Iterator[Observation]:
    """A committed result comes from the run of the handler that belongs to the epoch of the commit."""
    runs = {run.id: run for run in history.handler_runs}
    for result in history.results:
        run, task = runs.get(result["value"].get("run", "")), history.task_by_id.get(result["task_id"])
        if run is not None and run.claim is not None and task is not None:
            sentence = (
                f"{history.name_of(run.task)} was committed at epoch {task['epoch']} with the result of the run that"
                f" belonged to epoch {run.claim.epoch}"
            )
            yield observed("result", sentence, good=run.claim.epoch == task["epoch"])


def _by_its_claimer(history: History, change: Change, claim: Claim | None) -> Observation:
    name, status = history.name_of(change.row["id"]), change.row["status"]
    if claim is None:
        return Observation("settlement", f"{name} was made {status} by {change.process}, and nobody had claimed it")
    sentence = f"{name} was made {status} by {change.process} while epoch {claim.epoch} was {claim.process}'s"
    return observed("settlement", sentence, good=change.process == claim.process)


def _completes(before: Row, after: Row) -> bool:
    return bool(before["status"] != "succeeded" and after["status"] == "succeeded")


def _is_settlement(before: Row, after: Row) -> bool:
    """Whether the change is a write that needs the lease. The end of a lost lease and the end of a whole job need
    none.
    """
    if before["status"] != "running" or after["status"] in ("running", "cancelled"):
        return False
    return bool(after["losses"] == before["losses"])


def _is_inline(history: History, task: Row) -> bool:
    job = history.job_by_id.get(task["job_id"])
    return job is not None and (job["pipeline"], task["step"]) in history.terms.inline


def i7(history: History) -> Iterator[Observation]:
    """No task stays RUNNING for long after its lease has passed."""
    for overdue in history.overdue:
        yield observed("look at leases", "; ".join(overdue), good=not overdue)
    for task in history.tasks:
        yield observed("step at rest", f"{history.name_of(task['id'])} is running", good=task["status"] != "running")
