"""In every state that the protocol can reach its promises hold; and each guard is needed for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.protocol import GUARDS, Bounds, Protocol, explore

_ROOT = Path(__file__).parents[2]

#: What goes wrong without the guard.
WITHOUT = {
    "epoch": "a commit of an older epoch than the row's",
    "ack": "a runnable task that nobody will ever hear of",
    "outbox": "a runnable task that nobody will ever hear of",
    "create_only": "the row names bytes that are not in the store",
    "confirm": "a runnable task that nobody will ever hear of",
    "flush": "a runnable task that nobody will ever hear of",
    "whole_batch": "a runnable task that nobody will ever hear of",
    "split": "a runnable task that nobody will ever hear of",
}


def test_every_interleaving_keeps_the_promises_and_can_end() -> None:
    explored = explore(Protocol())
    assert explored.broken is None, "\n".join([explored.broken or "", *explored.trace])
    assert explored.states > 10_000  # it looked at something
    for page in ("README.md", "docs/explanation/guarantees.md"):
        assert f"({explored.states:,} states)" in (_ROOT / page).read_text(), page


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_a_promise_breaks(guard: str) -> None:
    explored = explore(Protocol(frozenset({guard})))
    assert explored.broken == WITHOUT[guard], explored.trace
    assert explored.trace  # and this is how


def test_without_faults_there_is_one_attempt() -> None:
    quiet = Bounds(epochs=1, crashes=0, copies=0, unheard=0)
    assert explore(Protocol(bounds=quiet)).broken is None
