"""A workflow that is cancelled sees its cancel, at one place, and undoes its work; each guard is needed for it."""

from __future__ import annotations

import pytest

from tests.model.exploring import explore
from tests.model.undoing import GUARDS, State, Undoing, violated

_UNSEEN = "a workflow ends within the grace and has not seen its cancel"
_SUCCEEDS = "a run whose work was undone succeeds"
#: What goes wrong without the guard.
WITHOUT = {
    "resume": _UNSEEN,
    "leased": _UNSEEN,
    "refuse": "a workflow waits that is to see its cancel",
    "mark": _SUCCEEDS,
    "epoch": _SUCCEEDS,
    "return": _UNSEEN,
    "called": "a workflow that has called nothing begins after its cancel",
}


def test_in_every_interleaving_the_workflow_sees_its_cancel_at_one_place() -> None:
    explored = explore(State(), Undoing().moves, violated)
    assert explored.broken is None, "\n".join([explored.broken or "", *explored.trace])
    assert sum(bool(s.undone) for s in explored.states) > 1000  # it looked at something


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_a_promise_breaks(guard: str) -> None:
    explored = explore(State(), Undoing(frozenset({guard})).moves, violated)
    assert explored.broken == WITHOUT[guard], explored.trace
    assert explored.trace  # and this is how
