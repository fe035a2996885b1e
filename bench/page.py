"""Writes the table of docs/explanation/performance.md from the rows in figures.jsonl beside it.

`scripts/bench FIGURE --record` writes the rows that it has just measured, with their commit, date and machine, and then
the table. `scripts/bench --page` writes the table alone: it marks each row whose code has changed since its commit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from bench.figure import Figure

_ROOT = Path(__file__).parents[1]
PAGE = _ROOT / "docs/explanation/performance.md"
ROWS = _ROOT / "docs/explanation/figures.jsonl"
_BEGIN, _END = "<!-- figures: begin -->\n", "<!-- figures: end -->\n"
_HEAD = "| figure | unit | median | range | load | goal | measured |\n|---|---|---|---|---|---|---|\n"
#: A number below this is written with two decimals.
_SMALL = 100
_CORE = ("leasehold/broker", "leasehold/db", "leasehold/runtime", "leasehold/transitions", "worker")
#: Figure -> the folders of the code that it measures. A figure that is not listed here measures all code.
MEASURED = {
    "throughput": _CORE,
    "burst": _CORE,
    "fleet": _CORE,
    "workflows": _CORE,
    "latency": _CORE,
    "snapshot": _CORE,
    "steady": _CORE,
    "writes": ("leasehold/broker", "leasehold/db", "leasehold/transitions", "migrations"),
    "tables": ("leasehold/db", "leasehold/transitions", "migrations"),
    "growth": ("leasehold/db", "leasehold/transitions", "migrations"),
    "surface": ("leasehold/db", "migrations"),
    "console": ("api/console", "api/jobs", "leasehold/db"),
    "operations": ("leasehold/actions", "leasehold/pipelines/operations", "leasehold/transitions"),
    "image": ("leasehold/pipelines/media", "leasehold/storage", "worker"),
    "pictures": ("leasehold/pipelines/media", "leasehold/storage", "worker"),
    "conversion": ("leasehold/pipelines/conversion", "api/conversion", "worker/sandbox", "worker/attempts"),
    "generation": ("leasehold/pipelines/generation", "api/generation", *_CORE),
    "submit": ("api", "leasehold/broker", "leasehold/limits", "leasehold/transitions"),
    "waiting": ("api/runs", "leasehold/transitions"),
    "metrics": ("leasehold/exporter", "leasehold/telemetry", "worker"),
}
_ALL = ("api", "leasehold", "worker", "migrations")


@dataclass(frozen=True, slots=True)
class Row:
    """A measured figure. `row`: its name in the table, and its key. `commit`: the commit of the measured code."""

    row: str
    unit: str
    median: float
    low: float
    high: float
    load: float
    goal: str
    missed: bool
    command: str
    commit: str
    date: str
    machine: str

    @property
    def folders(self) -> tuple[str, ...]:
        """The code that the row measured."""
        return MEASURED.get(figure_of(self.command), _ALL)


def figure_of(command: str) -> str:
    """The figure that `scripts/bench FIGURE ...` measures."""
    return command.split()[1]


def read() -> list[Row]:
    return [Row(**json.loads(line)) for line in ROWS.read_text().splitlines()]


def record(figures: Sequence[Figure], command: str, machine: str) -> None:
    """Replace the rows with the same names. Add new rows after the last row of their figure."""
    rows = read()
    commit = _git("rev-parse", "--short=7", "HEAD").strip()
    for figure in figures:
        new = _row_of(figure, command, commit, machine)
        places = [place for place, row in enumerate(rows) if row.row == new.row]
        if places:
            rows[places[0]] = new
        else:
            same_figure = [place for place, row in enumerate(rows) if figure_of(row.command) == figure_of(command)]
            rows.insert(same_figure[-1] + 1 if same_figure else len(rows), new)
    ROWS.write_text("".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows))
    render(has_changed)


def _row_of(figure: Figure, command: str, commit: str, machine: str) -> Row:
    goal = figure.goal
    return Row(
        row=figure.name,
        unit=figure.unit,
        median=round(figure.median, 3),
        low=round(min(figure.runs), 3),
        high=round(max(figure.runs), 3),
        load=round(max(figure.load), 1),
        goal="" if goal is None else f"{goal.value:g} or {'more' if goal.at_least else 'less'}",
        missed=goal is not None and not goal.met_by(figure.median),
        command=command,
        commit=commit,
        date=datetime.now(UTC).date().isoformat(),
        machine=machine,
    )


def render(changed: Callable[[Row], bool]) -> None:
    """Write the table into the page. `changed`: returns whether the code that a row measured has changed since."""
    page = PAGE.read_text()
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(before + _BEGIN + table(read(), changed) + _END + after)


def table(rows: Sequence[Row], changed: Callable[[Row], bool]) -> str:
    lines = []
    for row in rows:
        spread = f"{_number(row.low)} to {_number(row.high)}"
        goal = f"{row.goal}: missed" if row.missed else row.goal
        measured = f"{row.date}, {row.commit}, {row.machine}{', older than its code' if changed(row) else ''}"
        cells = [row.row, row.unit, _number(row.median), spread, f"{row.load:.1f}", goal, measured]
        lines.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(lines)


def _number(value: float) -> str:
    return f"{value:.2f}" if abs(value) < _SMALL else f"{value:,.0f}"


def has_changed(row: Row) -> bool:
    """Whether a commit after the row's has changed a folder that the row measured. An unknown commit counts as old."""
    return _differs(row.commit, row.folders)


@cache
def _differs(commit: str, folders: tuple[str, ...]) -> bool:
    """Whether the folders differ from the commit. Cached, because all rows of one measurement have the same commit."""
    difference = subprocess.run(
        ["git", "diff", "--quiet", commit, "HEAD", "--", *folders],
        cwd=_ROOT, check=False, capture_output=True,
    )  # fmt: skip
    return difference.returncode != 0


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments],
        cwd=_ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
