"""Judges I25: only the holder of a workflow's lease writes the rows of its calls, and no result changes."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.evidence import Row
from chaos.history import History
from chaos.row_changes import Change


def i25(history: History) -> Iterator[Observation]:
    """Each call of a workflow has one row, written by the holder of its lease, and a result never changes."""
    for change in history.changes:
        if change.kind != "call" or change.after is None:
            continue
        name = f"the call {change.after['branch']}/{change.after['number']} of workflow {change.after['job_id']}"
        if change.before is not None and change.before["state"] != "open":
            yield observed("result of a call", f"{name} was {change.before} and became {change.after}", good=False)
        elif change.before is not None:
            yield Observation("result of a call")
        lease = _lease_at(history, change)
        sentence = f"{name} was written under epoch {change.after['epoch']}, while the lease was {lease or 'free'}"
        yield observed("call", sentence, good=lease == f"epoch {change.after['epoch']}")


def _lease_at(history: History, change: Change) -> str:
    """The lease of the workflow's own task when the row of the call was written; "": nobody held it.

    One statement suspends a workflow: it writes the call and releases the lease. So if the same transaction also
    changed the task, the lease before that change counts.
    """
    row: Row | None = None
    for task in history.tasks_of.get(change.row["job_id"], ()):
        if task["contained"]:
            continue
        for other in history.task_changes.get(task["id"], ()):
            if other.xact == change.xact:
                row = other.before
                break
            if other.number > change.number:
                break
            row = other.after
    return f"epoch {row['epoch']}" if row is not None and row["status"] == "running" else ""
