"""The record of runs: what a line keeps, and what the table says of many."""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chaos import report
from chaos.catalogue import ALONE, CATALOGUE, EVERYTHING
from chaos.checker import Verdict
from chaos.plan import Fault, Plan
from chaos.record import FIRST_SEED, GOAL, append, plan_of, read, seeds, table, write_page
from chaos.report import commit
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


def test_a_row_of_figures_sums_up_the_runs_of_a_fault_that_was_alone(tmp_path: Path) -> None:
    file, failover = tmp_path / "runs.jsonl", ALONE[0].name
    plan = Plan(7, 12.0, blows=(Fault(failover, 1.0), Fault(failover, 7.0)))
    verdicts = [Verdict("I1", "says", "violated", {"accepted job": 9}, ("why",), 2), Verdict("I2", "says", "ok")]
    for waits, more in (([0.25, 1.5], {"verdicts": verdicts}), ([0.5, math.inf], {"charges": 3})):
        made = Report(plan, "", rested=True, fired=Counter([failover]), jobs=Counter({"short succeeded": 600}), **more)
        made.until_claims = waits
        report.append(made, file)
    report.append(Report(Plan(8, 12.0, blows=(Fault(SLOW, 1.0),)), "", jobs=Counter({"short failed": 7})), file)
    report.append(Report(Plan(8, 12.0, armed=(Fault(KILL),), blows=(Fault(SLOW, 1.0),)), ""), file)
    rows = report.table_by_fault(report.read([file])).splitlines()[2:]
    assert rows == [
        f"| {SLOW} | 1 | 1 | 7 |  | 0 | 0 |  |",
        f"| {failover} | 2 | 1 | 1,200 | 1.00 s, inf s | 2 | 0 | 3 |",
    ]


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


def test_a_record_that_was_stopped_goes_on_with_the_seeds_that_its_commit_lacks() -> None:
    lines = [line(seed=30_000), line(seed=30_002), line(commit="bbb", seed=30_001)]
    assert seeds(lines, "aaa", first=30_000, runs=4) == [30_001, 30_003]
    assert len(seeds(lines, "aaa")) + 2 == GOAL["runs"]
    assert seeds([line(seed=seed) for seed in range(9)], "aaa", first=0, runs=9) == []


def test_a_hundred_recorded_runs_deal_every_fault_often_enough() -> None:
    """Each more often than the goal asks for: not every one fires. An API is killed by two processes' failpoints."""
    dealt = Counter(
        fault.name
        for seed in range(FIRST_SEED, FIRST_SEED + GOAL["runs"])
        for fault in plan_of(seed, EVERYTHING).faults
    )
    assert min(dealt[kind.name] for kind in CATALOGUE if kind not in ALONE) > GOAL["firings"]


def test_a_recorded_run_that_an_error_ended_is_red(tmp_path: Path) -> None:
    append(Report(Plan(7, 12.0), "", failure="TimeoutError: "), tmp_path / "runs.jsonl")
    assert read(tmp_path / "runs.jsonl")[0]["red"] == ["TimeoutError: "]


def test_what_a_record_writes_is_no_change_of_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )

    (tmp_path / "docs" / "explanation").mkdir(parents=True)
    written, code = tmp_path / "docs" / "explanation" / "chaos.jsonl", tmp_path / "code.py"
    for file in (written, code):
        file.write_text("")
    for words in (("init",), ("add", "."), ("commit", "-m", "one")):
        git(*words)
    monkeypatch.setattr("chaos.report._ROOT", tmp_path)
    at = commit()
    written.write_text("a line\n")
    assert commit() == at
    code.write_text("changed\n")
    assert commit() == f"{at}+"


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
