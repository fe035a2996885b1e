"""The figures of the docs: each row says what was measured, where, when, and whether its code has changed since."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import page
from bench.__main__ import FIGURES
from bench.figure import Figure, Goal

LATENCY = Figure("latency, amqp, p50", "ms", (3.0, 2.0, 4.0), (1.0, 1.5, 0.5), Goal(2))
NEW = Figure("latency, amqp, p10", "ms", (200.0,), (1.0,), Goal(100, at_least=True))


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Copies of the rows and of the page, to be changed."""
    for name in ("ROWS", "PAGE"):
        copy = tmp_path / getattr(page, name).name
        copy.write_text(getattr(page, name).read_text())
        monkeypatch.setattr(page, name, copy)
    return tmp_path


def test_the_page_shows_every_row_as_it_was_kept() -> None:
    marked = page.PAGE.read_text().replace(", older than its code", "")
    assert page.table(page.read(), lambda _row: False) in marked


def test_every_row_names_a_figure_that_the_bench_measures() -> None:
    assert {page.figure_of(row.command) for row in page.read()} <= FIGURES.keys()
    assert page.MEASURED.keys() <= FIGURES.keys()


def test_every_folder_that_a_row_measures_exists() -> None:
    root = Path(__file__).parents[2]
    assert [folder for row in page.read() for folder in row.folders if not (root / folder).is_dir()] == []


def test_what_is_measured_again_takes_the_place_of_its_row_with_its_own_commit(kept: Path) -> None:
    before = page.read()
    page.record([LATENCY, NEW], "scripts/bench latency", "C")
    after = page.read()
    assert len(after) == len(before) + 1
    row = after[[row.row for row in before].index(LATENCY.name)]
    assert (row.median, row.low, row.high, row.load, row.goal, row.missed) == (3.0, 2.0, 4.0, 1.5, "2 or less", True)
    assert (row.machine, row.commit) not in {(old.machine, old.commit) for old in before if old.row == LATENCY.name}
    latencies = [row.row for row in after if row.command == "scripts/bench latency"]
    assert latencies[-1] == NEW.name
    text = (kept / page.PAGE.name).read_text()
    assert f"| latency, amqp, p10 | ms | 200 | 200 to 200 | 1.0 | 100 or more | {row.date}, {row.commit}, C |" in text


def test_a_row_whose_code_has_changed_since_is_marked_and_another_is_not() -> None:
    rows = page.read()[:2]
    lines = page.table(rows, lambda row: row is rows[1]).splitlines()[2:]
    assert ["older than its code" in line for line in lines] == [False, True]


def test_a_row_of_an_unknown_commit_counts_as_old() -> None:
    (row, *_) = page.read()
    unknown = page.Row(**{name: getattr(row, name) for name in row.__slots__} | {"commit": "0" * 7})
    assert page.has_changed(unknown)


def test_the_page_on_scale_repeats_the_log_of_a_job_as_the_figures_have_it() -> None:
    (measured,) = re.findall(r"^\| all \| ([0-9,]+) \|", page.PAGE.read_text(), re.MULTILINE)
    scale = page.PAGE.parents[1] / "operations/scale.md"
    assert re.findall(r"^\| log \(WAL\) \| ([0-9,]+) bytes", scale.read_text(), re.MULTILINE) == [measured]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("throughput, amqp, 1 worker", "| {hundreds:,.0f} a second;"),
        ("killed worker to its step running elsewhere, p50 of 17 kills", "| after {seconds:.2f} s (p50), "),
        (
            "killed worker to its step running elsewhere, p99 (the slowest of 17)",
            "{seconds:.2f} s (the slowest of",
        ),
        ("a claim of 16 beside 10,000,000, p99, to that beside 10,000", "| {median:.2f} (p99) |"),
        ("image, pipeline to bare steps", "| {median:.2f} | `scripts/bench image` |"),
    ],
)
def test_the_readme_quotes_the_rows_as_they_are(row: str, words: str) -> None:
    (median,) = [measured.median for measured in page.read() if measured.row == row]
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert words.format(median=median, seconds=median / 1000, hundreds=round(median, -2)) in readme
