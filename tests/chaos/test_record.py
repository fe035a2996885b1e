"""The record of runs: what a line keeps, and what the table says of many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from chaos.checker import Verdict
from chaos.plan import Fault, Plan
from chaos.record import append, read, table, write_page
from chaos.run import Report
from chaos.spans import Span, pairs, spans_of

KILL, HOLD, SLOW = "F2 after_claim:kill", "F9 hold a put", "F27 slow s3"


def line(**changes: Any) -> dict[str, Any]:
    kept = {
        "commit": "aaa", "at": "2026-11-22T16:00Z", "seed": 1, "load": 12.0, "seconds": 40, "rest": 1.0, "jobs": 100,
        "observed": {"I1": 600}, "spans": [[HOLD, 1.0, 7.0], [SLOW, 5.0, 9.0]], "red": [],
    }  # fmt: skip
    return kept | changes


def test_rows_of_many_commits_add_up_and_say_at_which_they_were_seen_last() -> None:
    text = table([line(), line(commit="bbb", observed={"I1": 500, "I2": 3}, spans=[[KILL, 1.0, 3.0]])])
    assert "2 runs" in text
    assert "| 1,100 | 500 | bbb | 0 |" in text
    assert "| 3 (goal: 1,000) | 3 | bbb | 0 |" in text
    assert f"| {KILL} | 1 (goal: 10) | bbb | 0 |" in text
    assert f"| {SLOW} | 1 (goal: 10) | aaa | 1 |" in text
    assert "| F23 kill the database | 0 (goal: 10) | never | 0 |" in text


def test_a_red_run_stays_in_the_table() -> None:
    text = table([line(red=["I8 violated", f"{KILL} never fired"]), line(seed=2)])
    assert "1 runs were red" in text
    assert f"| 1 | aaa | 12 s | I8 violated; {KILL} never fired |" in text


def test_a_line_keeps_what_the_table_needs(tmp_path: Path) -> None:
    plan = Plan(7, 12.0, blows=(Fault(SLOW, 1.0, "worker-0", 4.0),))
    made = Report(plan, "", rested=True, verdicts=[Verdict("I1", "says", "violated", {"accepted job": 9}, ("why",), 1)])
    append(made, tmp_path / "runs.jsonl")
    kept = read(tmp_path / "runs.jsonl")[0]
    assert (kept["seed"], kept["observed"]) == (7, {"I1": 9})
    assert kept["red"] == ["I1 violated", f"{SLOW} never fired"]


def test_a_run_whose_requests_are_refused_is_red_unless_the_release_serves() -> None:
    answers = Counter({"cancel refused": 9, "flaky refused": 1, "flaky accepted": 3})
    made = Report(Plan(7, 12.0), "", rested=True, answers=answers)
    assert (made.reasons, made.good) == (["flaky refused"], False)
    release = Plan(7, 12.0, blows=(Fault("F42 an old API beside the new", 1.0, "api-0", 4.0),))
    assert Report(release, "", rested=True, answers=answers).refused == []


def test_the_table_is_written_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin: scripts/chaos --record -->\nthe former table\n<!-- end -->\nafter\n")
    write_page([line()], page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "the former table" not in text
    assert "1 runs" in text


def test_a_fault_is_on_while_it_acts_and_only_if_it_fired() -> None:
    plan = Plan(7, 12.0, (Fault(KILL, target="worker-0"),))
    journal = [
        {"what": "failpoint", "process": f"{slot}.0", "name": "after_claim", "act": "kill", "at": 1004.0}
        for slot in ("worker-0", "worker-1")
    ]
    assert spans_of(plan, [(HOLD, 1002.0, 1008.0)], journal, 1000.0) == [Span(HOLD, 2.0, 8.0), Span(KILL, 4.0, 6.0)]


def test_two_faults_overlap_when_both_were_on_at_once() -> None:
    spans = [Span(HOLD, 1.0, 7.0), Span(SLOW, 7.0, 9.0), Span(KILL, 6.0, 8.0), Span(KILL, 6.5, 8.5)]
    assert pairs(spans) == {(KILL, SLOW), (KILL, HOLD)}
