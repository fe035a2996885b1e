"""Leases: one owner at a time, one epoch a claim, and no write by whoever lost the task."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.audit import Change, seconds
from chaos.history import Claim, History, Row

#: How far apart the proxy and the database may see the same end of a session.
_SAME_MOMENT = 1.0
#: How far the two clocks' readings of one order of events may be apart: it is the same clock.
_CLOCK = 0.005
_HEARTBEAT = "leasehold heartbeat"


def i5(history: History) -> Iterator[str]:
    """The epoch rises by exactly 1 per claim, and no two claims share one."""
    for task, claims in history.claims.items():
        epochs = [claim.epoch for claim in claims]
        if epochs != list(range(1, len(epochs) + 1)):
            yield f"{history.name_of(task)} was claimed with the epochs {epochs}"
    for row in history.tasks:
        count = len(history.claims.get(row["id"], ()))
        if row["epoch"] != count:
            yield f"{history.name_of(row['id'])} has epoch {row['epoch']} after {count} claims"


def i6(history: History) -> Iterator[str]:
    """No committed write carries an epoch lower than the row's: only the holder settles, once its handler has ended."""
    ended: dict[tuple[str, int], list[float]] = {}
    yield from _stale_results(history)
    for run in history.runs():
        if run.claim is not None and run.end is not None:
            ended.setdefault((run.task, run.claim.epoch), []).append(run.end)
    for task, changes in history.task_changes.items():
        by_epoch = {claim.epoch: claim for claim in history.claims.get(task, ())}
        for change in changes:
            before, after = change.before, change.after
            if not before or not after:
                continue
            if after["epoch"] < before["epoch"]:
                yield f"{history.name_of(task)} went back from epoch {before['epoch']} to {after['epoch']}"
            if _is_settlement(before, after):
                yield from _foreign(history, change, by_epoch.get(before["epoch"]))
            if after["status"] == "succeeded" and _is_inline(history, after):
                ends = ended.get((task, before["epoch"]), [])
                if not any(end <= change.at + _CLOCK for end in ends):
                    yield (
                        f"{history.name_of(task)} was completed at epoch {before['epoch']} by {change.process} although"
                        " the handler that ran at this epoch had not ended"
                    )


def _stale_results(history: History) -> Iterator[str]:
    """What was committed must come from the run that belongs to the epoch of the commit."""
    runs = {run.id: run for run in history.runs()}
    for result in history.results:
        run, task = runs.get(result["value"].get("run", "")), history.task_by_id.get(result["task_id"])
        if run is not None and run.claim is not None and task is not None and run.claim.epoch != task["epoch"]:
            yield (
                f"{history.name_of(run.task)} was committed at epoch {task['epoch']} with the result of the run that"
                f" belonged to epoch {run.claim.epoch}"
            )


def _foreign(history: History, change: Change, claim: Claim | None) -> Iterator[str]:
    if claim is not None and change.process != claim.process:
        status = change.row["status"]
        yield (
            f"{history.name_of(claim.task)} was made {status} by {change.process} while epoch {claim.epoch} was"
            f" {claim.process}'s"
        )


def _is_settlement(before: Row, after: Row) -> bool:
    """A write that needs the lease; what time ends (a loss, a job's end) does not."""
    if before["status"] != "running" or after["status"] in ("running", "cancelled"):
        return False
    return bool(after["losses"] == before["losses"])


def _is_inline(history: History, task: Row) -> bool:
    job = history.job_by_id.get(task["job_id"])
    return job is not None and (job["pipeline"], task["step"]) in history.terms.inline


def i7(history: History) -> Iterator[str]:
    """No task stays RUNNING for long after its lease has passed."""
    yield from sorted(set(history.overdue))
    for task in history.tasks:
        if task["status"] == "running":
            yield f"{history.name_of(task['id'])} is running at rest"


def i8(history: History) -> Iterator[str]:
    """A lease is taken from somebody only once it has passed or its owner's presence has ended; one claim, one run."""
    for task, changes in history.task_changes.items():
        for change in changes:
            if change.before and change.after and _takes_away(change.before, change.after):
                passed = seconds(change.before["lease_until"]) <= change.at
                claim = next((c for c in history.claims.get(task, ()) if c.epoch == change.before["epoch"]), None)
                if not passed and claim is not None and _stayed(history, claim.process, claim.at, change.at):
                    yield f"{history.name_of(task)} was taken from {claim.process}, which was there and held its lease"
    seen: set[tuple[str, int]] = set()
    for run in history.runs():
        if run.claim is None:
            yield f"{history.name_of(run.task)} ran in {run.process}, which had not claimed it"
        elif (run.task, run.claim.epoch) in seen:
            yield f"{history.name_of(run.task)} ran twice by the claim of epoch {run.claim.epoch}"
        else:
            seen.add((run.task, run.claim.epoch))


def _takes_away(before: Row, after: Row) -> bool:
    """Not who claims anew what it has claimed itself, by a commit whose answer it never heard."""
    mine = before["lease_owner"] == after["lease_owner"]
    return bool(before["status"] == "running" and after["losses"] > before["losses"] and not mine)


def _stayed(history: History, process: str, since: float, until: float) -> bool:
    """Whether one session of the process's heartbeat was certainly open all that time: whoever looks for the absent
    takes a while from the look to the taking.
    """
    return any(
        session.since < since - _SAME_MOMENT and session.until > until + _SAME_MOMENT
        for session in history.sessions
        if session.process == process and session.label == _HEARTBEAT and session.present
    )
