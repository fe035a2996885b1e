"""Judges I6: only the holder of a lease settles its task, and only after its handler has ended."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Row
from chaos.history import Claim, History
from chaos.row_changes import Change

#: The journal and the triggers that record changes of rows read one clock. If one event follows another,
#: their times may be in the wrong order by at most this many seconds.
_CLOCK_DIFFERENCE = 0.005


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
                yield observed("completion", sentence, good=any(end <= change.at + _CLOCK_DIFFERENCE for end in ends))


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
    sentence = f"{name} was made {status} by {change.process} while {claim.process} held epoch {claim.epoch}"
    return observed("settlement", sentence, good=change.process == claim.process)


def _completes(before: Row, after: Row) -> bool:
    return bool(before["status"] != "succeeded" and after["status"] == "succeeded")


def _is_settlement(before: Row, after: Row) -> bool:
    """Whether the change is a write that needs the lease. The end of a lost lease, which adds a loss, and the end of a
    whole job need no lease. A snooze of the step itself and a suspension set the losses to 0.
    """
    if before["status"] != "running" or after["status"] in ("running", "cancelled"):
        return False
    return bool(after["losses"] <= before["losses"])


def _is_inline(history: History, task: Row) -> bool:
    job = history.job_by_id.get(task["job_id"])
    return job is not None and (job["pipeline"], task["step"]) in history.terms.inline_steps
