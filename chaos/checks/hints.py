"""The outbox and the broker: a hint is written with what it tells of, sent, confirmed, and spent in that order."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator

from chaos.amqp_tap import Heard, What
from chaos.audit import Change, seconds
from chaos.checks.verdict import NotApplicable
from chaos.history import History, Row
from leasehold.domain.states import TASK_TERMINAL

_CLOCK = 0.005
_RUNNABLE = ("pending", "retry", "waiting")


def i9(history: History) -> Iterator[str]:
    """The ACK of a hint is later than the commit that made the hint unnecessary."""
    _needs_broker(history)
    for heard in history.heard:
        changes = history.task_changes.get(heard.task)
        if heard.what is not What.ACKED or not changes:
            continue
        closed = history.closed_at.get(changes[0].row["job_id"], float("inf"))
        if closed > heard.at + _CLOCK and _was_claimable_throughout(changes, heard):
            waited = 1000 * (heard.at - heard.since)
            yield (
                f"{heard.process} acknowledged the hint of {history.name_of(heard.task)} {waited:.0f} ms after it came,"
                " while the task could have been claimed all that time"
            )


def _was_claimable_throughout(changes: list[Change], heard: Heard) -> bool:
    """Whether at no moment between delivery and ACK the hint was unnecessary."""
    start = max(0, bisect_right([change.at for change in changes], heard.since - _CLOCK) - 1)
    for index in range(start, len(changes)):
        if changes[index].at > heard.at + _CLOCK:
            break
        until = changes[index + 1].at if index + 1 < len(changes) else heard.at
        if not _is_claimable(changes[index].row, min(until, heard.at)):
            return False
        if not _is_claimable(changes[index].row, max(changes[index].at, heard.since)):
            return False
    return True


def _is_claimable(task: Row, at: float) -> bool:
    if task["status"] == "running":
        return seconds(task["lease_until"]) < at
    return task["status"] in _RUNNABLE and seconds(task["available_at"]) <= at


def i10(history: History) -> Iterator[str]:
    """A hint is written in the commit that needs it, is dropped only once confirmed, and the outbox runs empty."""
    yield from _written_elsewhere(history)
    for row in history.outbox:
        name = history.name_of(row["task_id"])
        yield f"the hint of {name} is in the outbox {history.rest_seconds:.0f} s after the faults"
    if history.has_broker:
        yield from _dropped_unconfirmed(history)


def _written_elsewhere(history: History) -> Iterator[str]:
    hinted = {
        (change.xact, change.row["task_id"]) for change in history.changes if change.of == "outbox" and change.after
    }
    for task, changes in history.task_changes.items():
        for change in changes:
            if (change.moved() or ("", ""))[1] == "pending" and (change.xact, task) not in hinted:
                yield f"{history.name_of(task)} became runnable in a transaction that wrote no hint"


def _dropped_unconfirmed(history: History) -> Iterator[str]:
    confirmed: defaultdict[str, list[Heard]] = defaultdict(list)
    for heard in history.heard:
        if heard.what is What.CONFIRMED:
            confirmed[heard.task].append(heard)
    for change in history.changes:
        if change.of == "outbox" and change.before:
            task, written = change.before["task_id"], seconds(change.before["created_at"])
            if not any(c.since >= written - _CLOCK and c.at <= change.at + _CLOCK for c in confirmed[task]):
                yield f"the hint of {history.name_of(task)} was dropped from the outbox without a confirm"


def i11(history: History) -> Iterator[str]:
    """At rest the queues are empty, and the task of every dead-lettered hint has ended."""
    _needs_broker(history)
    for queue, count in history.queued.items():
        if count:
            yield f"{queue} holds {count} messages at rest"
    for queue, count in history.returned.items():
        if count > history.queued.get(queue, 0):
            yield f"{queue} had {count} messages at rest that a worker held and never acknowledged"
    for body in history.parked:
        for task in history.tasks:
            if task["id"] in body and task["status"] not in TASK_TERMINAL:
                yield f"the hint of {history.name_of(task['id'])} is dead-lettered, and its task is {task['status']}"


def _needs_broker(history: History) -> None:
    if not history.has_broker:
        raise NotApplicable("there is no broker on this machine")
