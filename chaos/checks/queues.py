"""Judges I11: the broker holds no message once the installation is at rest."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import NotApplicable, Observation, observed
from chaos.history import History
from leasehold.domain.states import TASK_TERMINAL


def i11(history: History) -> Iterator[Observation]:
    """At rest the queues are empty, and the task of every dead-lettered hint has ended."""
    if not history.has_broker:
        raise NotApplicable("the run has no broker")
    for queue, count in history.queued.items():
        yield observed("queue ready", f"{queue} holds {count} messages at rest", good=not count)
    for queue, count in history.returned.items():
        sentence = f"{queue} had {count} messages at rest that a worker held and never acknowledged"
        yield observed("queue held", sentence, good=count <= history.queued.get(queue, 0))
    for body in history.dead_letters:
        for task in history.tasks:
            if task["id"] in body:
                sentence = (
                    f"the hint of {history.name_of(task['id'])} is dead-lettered, and its task is {task['status']}"
                )
                yield observed("dead letter", sentence, good=task["status"] in TASK_TERMINAL)
