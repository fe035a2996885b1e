"""Judges I5: each claim of a task raises its epoch by 1."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History


def i5(history: History) -> Iterator[Observation]:
    """The epoch rises by exactly 1 per claim, and no two claims share one."""
    for task, claims in history.claims.items():
        for nth, claim in enumerate(claims, 1):
            sentence = f"{history.name_of(task)} was claimed with epoch {claim.epoch} by its claim number {nth}"
            yield observed("claim", sentence, good=claim.epoch == nth)
    suspensions = {
        (change.xact, (change.before or {})["lease_owner"])
        for changes in history.task_changes.values()
        for change in changes
        if change.moved() == ("running", "waiting")
    }
    for task, claims in history.claims.items():
        if not claims[0].before:
            sentence = f"{history.name_of(task)} was made with a lease, and not by the suspension of its workflow"
            is_good = (history.task_changes[task][0].xact, claims[0].owner) in suspensions
            yield observed("claim by a suspension", sentence, good=is_good)
    for row in history.tasks:
        count = len(history.claims.get(row["id"], ()))
        sentence = f"{history.name_of(row['id'])} has epoch {row['epoch']} after {count} claims"
        yield observed("step", sentence, good=row["epoch"] == count)
