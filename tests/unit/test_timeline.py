from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from leasehold.api.console import timeline as timelines
from leasehold.api.console.timeline import Bar, timeline
from leasehold.domain.ids import new_id
from leasehold.transitions.statements import statements

MADE_AT = datetime(2026, 1, 1, tzinfo=UTC)
STEP = {"id": "convert", "state": "succeeded"}


def after(seconds: int) -> datetime:
    return MADE_AT + timedelta(seconds=seconds)


def entry(kind: str, seconds: int, epoch: int) -> dict[str, Any]:
    return {"kind": kind, "step": "convert", "at": after(seconds), "epoch": epoch}


def bars_of(*ledger: dict[str, Any]) -> list[Bar]:
    job = {"created_at": MADE_AT, "finished_at": after(100)}
    (line,) = timeline(job, [STEP], ledger, [], after(100)).lines
    return line.bars


def test_between_a_lost_attempt_and_its_takeover_the_step_has_not_waited() -> None:
    bars = bars_of(entry("claimed", 10, 1), entry("taken_over", 60, 2), entry("completed", 100, 2))
    assert [(bar.shade, bar.x, bar.width) for bar in bars] == [("wait", 0, 100), ("lost", 100, 500), ("ok", 600, 400)]


def test_between_a_failed_attempt_and_the_next_the_step_waited() -> None:
    bars = bars_of(
        entry("claimed", 10, 1), entry("retried", 60, 1), entry("claimed", 80, 2), entry("completed", 100, 2)
    )
    assert [bar.shade for bar in bars] == ["wait", "no", "wait", "ok"]


def test_while_a_workflow_waits_it_has_no_attempt() -> None:
    bars = bars_of(
        entry("claimed", 10, 1), entry("suspended", 20, 1), entry("claimed", 80, 2), entry("completed", 100, 2)
    )
    assert [(bar.shade, bar.x, bar.width) for bar in bars] == [
        ("wait", 0, 100), ("ok", 100, 100), ("wait", 200, 600), ("ok", 800, 200)
    ]  # fmt: skip
    assert [bar.words.partition(":")[0] for bar in bars] == [
        "waited", "attempt 1 suspended", "waited", "attempt 2 succeeded"
    ]  # fmt: skip


def test_a_workflow_that_waits_now_is_drawn_as_waiting() -> None:
    job = {"created_at": MADE_AT}
    ledger = [entry("claimed", 10, 1), entry("suspended", 20, 1)]
    (line,) = timeline(job, [STEP | {"state": "waiting"}], ledger, [], after(100)).lines
    assert [(bar.shade, bar.words) for bar in line.bars][-1] == ("wait", "waits")
    assert (line.attempts, line.seconds) == (1, 10.0)


def words_of(line: timelines.Line) -> list[tuple[str, int, int, str]]:
    return [(bar.shade, bar.x, bar.width, bar.words.partition(":")[0]) for bar in line.bars]


@pytest.mark.parametrize("kind", ["cancelled", "skipped"])
def test_a_step_that_ended_while_it_waited_shows_its_wait(kind: str) -> None:
    """Of a cancel, `cancelled`; of the job's deadline or of another step's failure, `skipped`."""
    job = {"created_at": MADE_AT, "finished_at": after(100)}
    step = STEP | {"state": kind}
    (line,) = timeline(job, [step], [entry(kind, 70, 0)], [], after(100)).lines
    assert words_of(line) == [("wait", 0, 700, f"waited until it was {kind}")]
    tried = [entry("claimed", 10, 1), entry("retried", 20, 1), entry(kind, 70, 1)]
    (line,) = timeline(job, [step], tried, [], after(100)).lines
    assert words_of(line)[1:] == [("no", 100, 100, "attempt 1 failed, to be tried again"),
                                  ("wait", 200, 500, f"waited until it was {kind}")]  # fmt: skip
    assert (line.attempts, line.seconds) == (1, 10.0)


def test_a_cancelled_attempt_was_no_wait_and_a_blocked_step_has_waited_for_no_worker() -> None:
    assert [bar.shade for bar in bars_of(entry("claimed", 10, 1), entry("cancelled", 70, 1))] == ["wait", "off"]
    job = {"created_at": MADE_AT, "finished_at": after(100)}
    first, second = {"id": "first", "state": "cancelled"}, STEP | {"state": "skipped"}
    second_id = new_id()
    tasks = [
        {"id": new_id(), "step": "first", "unblocks": [second_id], "contained": False, "parent_id": None},
        {"id": second_id, "step": "convert", "unblocks": [], "contained": False, "parent_id": None},
    ]
    ledger = [entry("cancelled", 70, 0) | {"step": "first"}, entry("skipped", 70, 0)]
    lines = timeline(job, [first, second], ledger, cast("Any", tasks), after(100)).lines
    assert [[bar.shade for bar in line.bars] for line in lines] == [["wait"], []]


#: Events that neither begin nor end an attempt. `skipped`: of a step that no worker ran.
NO_ATTEMPT = {"submitted", "admitted", "cancel_requested", "replayed", "skipped"}
SETTLEMENTS = {"complete", "complete_last", "fail", "snooze", "suspend", "release", "fan_out", "acknowledge_cancel"}
_INSERT = re.compile(r"INSERT INTO event \(job_id, seq, tenant_id, kind, ([^)]+)\)\s+SELECT (.+?)\sFROM ", re.DOTALL)
_STATUS = re.compile(r"UPDATE task \w+\s+SET status = (CASE .+? END|'\w+')", re.DOTALL)
_WHEN = re.compile(r"WHEN '(\w+)' THEN")
_RESULT = re.compile(r"(?:THEN |ELSE |^)'(\w+)'")


def kinds_of(statement: str) -> set[str]:
    """The kinds of the events that a statement writes."""
    inserts = _INSERT.findall(statement)
    assert len(inserts) == statement.count("INSERT INTO event"), "its columns have another order"
    kinds: set[str] = set()
    for _, columns in inserts:
        kind = re.split(r",\s+(?![^()]*\))", columns)[3]
        found = set(_RESULT.findall(kind))
        if re.search(r"(ELSE |^)\w+\.status", kind):  # the status that the same statement gave to the task
            statuses = {status for one in _STATUS.findall(statement) for status in _RESULT.findall(one)}
            found |= statuses - set(_WHEN.findall(kind))
        assert found, kind
        kinds |= found
    return kinds


def test_the_timeline_knows_every_kind_of_event_that_is_written() -> None:
    kinds = {name: kinds_of(text) for name, text in statements().items()}
    known = timelines._CLAIMS | timelines._ENDS.keys() | NO_ATTEMPT
    assert sorted(set().union(*kinds.values())) == sorted(known)
    # Every worker's settlement but that of a cancelled attempt: such an event may be written without a worker, too.
    settled = set().union(*(kinds[name] for name in SETTLEMENTS)) & timelines._ENDS.keys()
    assert settled - {"cancelled", "lost"} == timelines.WRITTEN_BY_WORKERS
