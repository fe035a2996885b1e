"""Judges I10: the outbox has a hint from the commit that needs it until the broker has confirmed it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from chaos.amqp_tap import HintEvent, HintRecord
from chaos.checks.verdict import Observation, observed
from chaos.history import History, is_external
from chaos.row_changes import seconds

#: How far apart, in seconds, the proxy and the triggers that record changes of rows may see the same moment.
_CLOCK_DIFFERENCE = 0.005


def i10(history: History) -> Iterator[Observation]:
    """A hint is written in the commit that needs it, is dropped only once confirmed, and the outbox runs empty."""
    yield from _check_written(history)
    if history.gathered:
        names = [history.name_of(row["task_id"]) for row in history.outbox]
        sentence = f"{history.rest_seconds:.0f} s after the faults the outbox has hints: {', '.join(names)}"
        yield observed("outbox at rest", sentence, good=not names)
    if history.has_broker:
        yield from _check_dropped(history)


def _check_written(history: History) -> Iterator[Observation]:
    hinted = {
        (change.xact, change.row["task_id"]) for change in history.changes if change.kind == "outbox" and change.after
    }
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
    inserts = {change.row["id"]: change for change in history.changes if change.kind == "outbox" and change.after}
    for change in history.changes:
        if change.kind == "outbox" and change.before:
            task = change.before["task_id"]
            written = seconds(change.before["created_at"])
            if insert := inserts.get(change.before["id"]):  # the clock may have jumped between the two
                written = min(written - insert.ahead, insert.at)
            is_confirmed = any(
                publish.since >= written - _CLOCK_DIFFERENCE and publish.at <= change.at + _CLOCK_DIFFERENCE
                for publish in confirmed[task]
            )
            sentence = f"the hint of {history.name_of(task)} was dropped from the outbox without a confirm"
            yield observed("hint dropped", sentence, good=is_confirmed)
