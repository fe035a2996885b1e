"""The types that describe a dashboard (boards, rows, panels, variables), and functions that make PromQL for panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: Grafana's own names of units.
Unit = Literal["short", "s", "bytes", "percentunit", "reqps", "ops", "none", "dateTimeFromNow"]
FULL, HALF, THIRD, QUARTER, SIXTH = 24, 12, 8, 6, 4


@dataclass(frozen=True, slots=True)
class Panel:
    """`meaning`: what the panel shows, and why an operator looks at it. `queries`: legend -> PromQL. A value of at
    least `warn` is orange, and of at least `bad` red. With `low_is_bad`, a value below `warn` is orange, and below
    `bad` red.
    """

    title: str
    meaning: str
    queries: Mapping[str, str]
    unit: Unit = "short"
    kind: Literal["graph", "number"] = "graph"
    width: int = HALF
    warn: float | None = None
    bad: float | None = None
    low_is_bad: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Variable:
    """A menu at the top of a board, with the values that `label` has in `metric`."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    meaning: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = field(default=())


def number(
    title: str,
    meaning: str,
    query: str,
    unit: Unit = "short",
    *,
    warn: float | None = None,
    bad: float | None = None,
    low_is_bad: bool = False,
) -> Panel:
    """A panel with one number: the present value."""
    return Panel(title, meaning, {"": query}, unit, "number", SIXTH, warn, bad, low_is_bad)


def rate(metric: str, by: str = "", where: str = "") -> str:
    """PromQL: the increase of a counter in a second, summed over all processes."""
    return f"sum{_by(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def quantile(part: float, metric: str, by: str = "", where: str = "") -> str:
    """PromQL: the quantile `part` of a histogram, over all processes."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


def exported(metric: str, by: str = "", where: str = "") -> str:
    """PromQL: the value of the process that exports the database's metrics. When another process takes over, both may
    export: the larger value counts.
    """
    return f"max{_by(by)} ({metric}{{{where}}})"


def percentiles(metric: str, by: str = "", where: str = "") -> dict[str, str]:
    """The queries of a panel with the median and the 99th percentile of a histogram, by legend."""
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
    return {
        f"{name} {legend}".strip(): quantile(part, metric, by, where) for name, part in (("p50", 0.5), ("p99", 0.99))
    }


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
