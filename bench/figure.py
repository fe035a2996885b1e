"""The result of a measurement: the value of every run, with what a reader must know to trust it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal. `at_least`: a measured value must be at least `value`; otherwise at most."""

    value: float
    at_least: bool = False

    def met_by(self, measured: float) -> bool:
        return measured >= self.value if self.at_least else measured <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a picture: values of `label` in `unit`, over the x-axis `along`. Curves of one axis and unit share a
    panel.
    """

    label: str
    unit: str
    along: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure. `runs`: the value of each run. `load`: the machine's load average (1 minute) just before
    each run. `details`: facts that explain the value. `curve`: a picture shows the curve instead of the value.
    """

    name: str
    unit: str
    runs: tuple[float, ...]
    load: tuple[float, ...]
    goal: Goal | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    curve: Curve | None = None

    @property
    def median(self) -> float:
        return median(self.runs)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.runs),
            "max": max(self.runs),
            "runs": list(self.runs),
            "load": list(self.load),
            "goal": None if self.goal is None else str(self.goal),
            "met": None if self.goal is None else self.goal.met_by(self.median),
            "details": dict(self.details),
        }


def quantile(values: list[float], part: float) -> float:
    """The nearest-rank quantile: always a measured value, never an interpolated one."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * part), len(ordered) - 1)]
