"""Judges I18: a tick of a schedule makes at most one run."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History


def i18(history: History) -> Iterator[Observation]:
    """At most one run per schedule and tick; each schedule of the load has one tick."""
    for schedule, runs in history.runs_of.items():
        yield observed("tick", f"one tick of schedule {schedule} made {len(runs)} runs", good=len(runs) == 1)
