"""A workflow that has what it waits for is woken, and writes once; each guard is needed for it."""

from __future__ import annotations

import pytest

from tests.model.exploring import explore
from tests.model.waking import GUARDS, State, Waking, violated

#: What goes wrong without the guard.
WITHOUT = {
    "compare": "a workflow that nobody wakes has all that it waits for",
    "count": "a workflow that nobody wakes has all that it waits for",
    "epoch": "a write of an older epoch than the row's",
    "consume": "a signal is consumed twice",
}


def test_every_interleaving_wakes_the_workflow_and_consumes_its_signal_once() -> None:
    explored = explore(State(), Waking().moves, violated)
    assert explored.broken is None, "\n".join([explored.broken or "", *explored.trace])
    assert len(explored.states) > 1000  # it looked at something


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_a_promise_breaks(guard: str) -> None:
    explored = explore(State(), Waking(frozenset({guard})).moves, violated)
    assert explored.broken == WITHOUT[guard], explored.trace
    assert explored.trace  # and this is how
