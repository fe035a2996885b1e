"""Shows the figures as a table, and writes them as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from bench.figure import Figure

_SMALL = 100  # a figure below this is written with two decimals


def table(figures: Sequence[Figure]) -> Table:
    columns = Table("figure", "unit")
    for name in ("median", "min", "max", "goal", "load"):
        columns.add_column(name, justify="right")
    for figure in figures:
        numbers = [_number(value) for value in (figure.median, min(figure.runs), max(figure.runs))]
        columns.add_row(figure.name, figure.unit, *numbers, _goal(figure), f"{max(figure.load):.1f}")
    return columns


def _number(value: float) -> str:
    return f"{value:.2f}" if value < _SMALL else f"{value:,.0f}"


def _goal(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    return f"{figure.goal} {'met' if figure.goal.met_by(figure.median) else 'MISSED'}"


def show(console: Console, machine: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    servers = ", ".join(f"{name} {numbers}" for name, numbers in machine["servers"].items())
    console.print(f"{machine['cores']} cores, {machine['processor']}; {servers}", highlight=False)
    console.print(table(figures))
    for figure in figures:
        if figure.details:
            console.print(f"{figure.name}: {orjson.dumps(dict(figure.details)).decode()}", highlight=False)


def write(path: Path, machine: Mapping[str, Any], figures: Sequence[Figure]) -> None:
    numbers = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine),
        "figures": [figure.as_json() for figure in figures],
    }
    path.write_bytes(orjson.dumps(numbers, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
