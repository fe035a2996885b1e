"""The parts of which dashboards are described: boards, rows, panels and variables, and the PromQL of a panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

#: Grafana's own names of units.
Unit = Literal["short", "s", "bytes", "percentunit", "reqps", "ops", "none", "dateTimeFromNow"]
FULL, HALF, THIRD, QUARTER, SIXTH = 24, 12, 8, 6, 4


@dataclass(frozen=True, slots=True)
class Panel:
    """`meaning`: what the panel shows, and why an operator looks at it. `queries`: legend -> PromQL. From `warn` on the
    value is orange, from `bad` on it is red; with `low_is_bad`, below them.
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
    """A choice at the top of a board: the values that `label` has in `metric`."""

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
    """A panel with one number: the value of now."""
    return Panel(title, meaning, {"": query}, unit, "number", SIXTH, warn, bad, low_is_bad)


def rate(metric: str, by: str = "", where: str = "") -> str:
    """The increase of a counter in a second, summed over all processes."""
    return f"sum{_by(by)} (rate({metric}{{{where}}}[$__rate_interval]))"


def quantile(part: float, metric: str, by: str = "", where: str = "") -> str:
    """The quantile `part` of a histogram, over all processes."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) (rate({metric}_bucket{{{where}}}[$__rate_interval])))"


def exported(metric: str, by: str = "", where: str = "") -> str:
    """The value that the elected exporter reports. While another takes over, both may report: the larger counts."""
    return f"max{_by(by)} ({metric}{{{where}}})"


def percentiles(metric: str, by: str = "", where: str = "") -> dict[str, str]:
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
    return {
        f"{name} {legend}".strip(): quantile(part, metric, by, where) for name, part in (("p50", 0.5), ("p99", 0.99))
    }


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
