from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.api.console import timeline as timelines
from leasehold.api.console.timeline import Bar, timeline
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
