"""Judges I7: the sweeper frees a task soon after its lease has passed."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History


def i7(history: History) -> Iterator[Observation]:
    """No task stays RUNNING for long after its lease has passed."""
    for overdue in history.overdue:
        yield observed("look at leases", "; ".join(overdue), good=not overdue)
    for task in history.tasks:
        yield observed("step at rest", f"{history.name_of(task['id'])} is running", good=task["status"] != "running")
