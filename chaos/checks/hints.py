"""Checks outbox and broker (I9 to I11): a hint is written with the change that needs it, then sent, confirmed and
acknowledged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

from chaos.amqp_tap import Heard, What
from chaos.audit import Change, seconds
from chaos.checks.verdict import NotApplicable, Observation, observed
from chaos.history import History, Row, is_external
from leasehold.domain.states import TASK_TERMINAL

#: How far apart, in seconds, the proxy and the audit's triggers may see the same moment.
_CLOCK = 0.005
_RUNNABLE = ("pending", "retry", "waiting")


def i9(history: History) -> Iterator[Observation]:
    """The ACK of a hint is later than the commit that made the hint unnecessary."""
    _needs_broker(history)
    for heard in history.heard:
        changes = history.task_changes.get(heard.task)
        if heard.what is not What.ACKED or not changes:
            continue
        closed = history.closed_at.get(changes[0].row["job_id"], float("inf"))
        yield observed(
            "ACK",
            f"{heard.process} acknowledged the hint of {history.name_of(heard.task)}"
            f" {1000 * (heard.at - heard.since):.0f} ms after its delivery, although the task could be claimed all the"
            " time",
            good=closed <= heard.at + _CLOCK or not _was_claimable_throughout(history, changes, heard),
        )


def _was_claimable_throughout(history: History, changes: list[Change], heard: Heard) -> bool:
    """Whether the task could be claimed at every moment between the delivery and the ACK of its hint."""
    start = max(0, bisect_right([change.at for change in changes], heard.since - _CLOCK) - 1)
    for index in range(start, len(changes)):
        if changes[index].at > heard.at + _CLOCK:
            break
        until = changes[index + 1].at if index + 1 < len(changes) else heard.at
        if not _is_claimable(history, changes[index].row, min(until, heard.at)):
            return False
        if not _is_claimable(history, changes[index].row, max(changes[index].at, heard.since)):
            return False
    return True


def _is_claimable(history: History, task: Row, at: float) -> bool:
    """Whether a worker could claim the task, by the true clock and by the database's. Both must agree: the holder of a
    lease cannot know that a jump of the database's clock has ended the lease.
    """
    at = min(at, history.by_database(at))
    if task["status"] == "running":  # a task that has lost its last worker fails, and nobody claims it
        return seconds(task["lease_until"]) < at and task["losses"] < history.terms.max_losses
    return task["status"] in _RUNNABLE and seconds(task["available_at"]) <= at


def i10(history: History) -> Iterator[Observation]:
    """A hint is written in the commit that needs it, is dropped only once confirmed, and the outbox runs empty."""
    yield from _written_elsewhere(history)
    if history.gathered:
        names = [history.name_of(row["task_id"]) for row in history.outbox]
        sentence = f"{history.rest_seconds:.0f} s after the faults the outbox has hints: {', '.join(names)}"
        yield observed("outbox at rest", sentence, good=not names)
    if history.has_broker:
        yield from _dropped_unconfirmed(history)


def _written_elsewhere(history: History) -> Iterator[Observation]:
    hinted = {
        (change.xact, change.row["task_id"]) for change in history.changes if change.of == "outbox" and change.after
    }
    for task, changes in history.task_changes.items():
        for change in changes:
            if (change.moved() or ("", ""))[1] == "pending" and not is_external(change.row):
                sentence = f"{history.name_of(task)} became runnable in a transaction that wrote no hint"
                yield observed("hint written", sentence, good=(change.xact, task) in hinted)


def _dropped_unconfirmed(history: History) -> Iterator[Observation]:
    confirmed: defaultdict[str, list[Heard]] = defaultdict(list)
    for heard in history.heard:
        if heard.what is What.CONFIRMED:
            confirmed[heard.task].append(heard)
    inserts = {change.row["id"]: change for change in history.changes if change.of == "outbox" and change.after}
    for change in history.changes:
        if change.of == "outbox" and change.before:
            task = change.before["task_id"]
            written = seconds(change.before["created_at"])
            if insert := inserts.get(change.before["id"]):  # the clock may have jumped back between row and trigger
                written = min(written - insert.ahead, insert.at)
            is_confirmed = any(
                publish.since >= written - _CLOCK and publish.at <= change.at + _CLOCK for publish in confirmed[task]
            )
            sentence = f"the hint of {history.name_of(task)} was dropped from the outbox without a confirm"
            yield observed("hint dropped", sentence, good=is_confirmed)


def i11(history: History) -> Iterator[Observation]:
    """At rest the queues are empty, and the task of every dead-lettered hint has ended."""
    _needs_broker(history)
    for queue, count in history.queued.items():
        yield observed("queue ready", f"{queue} holds {count} messages at rest", good=not count)
    for queue, count in history.returned.items():
        sentence = f"{queue} had {count} messages at rest that a worker held and never acknowledged"
        yield observed("queue held", sentence, good=count <= history.queued.get(queue, 0))
    for body in history.parked:
        for task in history.tasks:
            if task["id"] in body:
                sentence = (
                    f"the hint of {history.name_of(task['id'])} is dead-lettered, and its task is {task['status']}"
                )
                yield observed("dead letter", sentence, good=task["status"] in TASK_TERMINAL)


def _needs_broker(history: History) -> None:
    if not history.has_broker:
        raise NotApplicable("the run has no broker")
