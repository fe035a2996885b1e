"""Judges I24: a run leaves no process, directory, lock or open transaction behind."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.checks.verdict import Observation, observed
from chaos.history import History


def i24(history: History) -> Iterator[Observation]:
    """After the run there is no orphaned process, directory, lock or open transaction."""
    for what, left in history.leftovers:
        yield observed(what, "; ".join(left), good=not left)
