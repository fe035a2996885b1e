"""Judges I10: the outbox has a hint from the commit that needs it until the broker has confirmed it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from chaos.amqp_tap import HintEvent, HintRecord
from chaos.checks.verdict import Observation, observed
from chaos.history import History, is_external
from chaos.row_changes import Change, seconds

#: How far apart, in seconds, the proxy and the triggers that record changes of rows may see the same moment.
_CLOCK_DIFFERENCE = 0.005


def i10(history: History) -> Iterator[Observation]:
    """A hint is written in the commit that needs it, is dropped only once confirmed, and the outbox runs empty."""
    yield from _check_written(history)
    if history.gathered:
        names = [history.name_of(task) for row in history.outbox for task in _tasks(row)]
        sentence = f"{history.rest_seconds:.0f} s after the faults the outbox has hints: {', '.join(names)}"
        yield observed("outbox at rest", sentence, good=not names)
    if history.has_broker:
        yield from _check_dropped(history)


def _tasks(row: Mapping[str, Any]) -> list[str]:
    """The tasks of whose hints `row` of `outbox` or `outbox_batch` consists."""
    return list(row["task_ids"]) if "task_ids" in row else [row["task_id"]]


def _of_outbox(history: History) -> list[Change]:
    return [change for change in history.changes if change.kind in ("outbox", "outbox_batch")]


def _hinted(history: History) -> set[tuple[str, str]]:
    """The transactions that wrote hints, each with the task of a hint."""
    return {(change.xact, task) for change in _of_outbox(history) if change.after for task in _tasks(change.after)}


def _was_taken(history: History, task: str, change: Change) -> bool:
    """Whether the task stopped being pending before `change`. The commit that makes it pending again writes a hint."""
    moves = (earlier.moved() for earlier in history.task_changes[task] if earlier.number < change.number)
    return any(move is not None and move[0] == "pending" for move in moves)


def _check_written(history: History) -> Iterator[Observation]:
    hinted = _hinted(history)
    for task, changes in history.task_changes.items():
        for change in changes:
            if (change.moved() or ("", ""))[1] == "pending" and not is_external(change.row):
                sentence = f"{history.name_of(task)} became runnable in a transaction that wrote no hint"
                yield observed("hint written", sentence, good=(change.xact, task) in hinted)


def _check_dropped(history: History) -> Iterator[Observation]:
    confirmed: defaultdict[str, list[HintRecord]] = defaultdict(list)
    for record in history.hint_records:
        if record.event is HintEvent.CONFIRMED:
            confirmed[record.task].append(record)
    hinted = _hinted(history)
    inserts = {(change.kind, change.row["id"]): change for change in _of_outbox(history) if change.after}
    for change in _of_outbox(history):
        if change.before is None:
            continue
        written = seconds(change.before["created_at"])
        if insert := inserts.get((change.kind, change.before["id"])):  # the clock may have jumped between the two
            written = min(written - insert.ahead, insert.at)
        for task in _tasks(change.before):
            if change.kind == "outbox_batch" and ((change.xact, task) in hinted or _was_taken(history, task, change)):
                continue  # the relay has made rows of `outbox` of the batch, without the tasks that were claimed since
            is_confirmed = any(
                publish.since >= written - _CLOCK_DIFFERENCE and publish.at <= change.at + _CLOCK_DIFFERENCE
                for publish in confirmed[task]
            )
            sentence = f"the hint of {history.name_of(task)} was dropped from the outbox without a confirm"
            yield observed("hint dropped", sentence, good=is_confirmed)
