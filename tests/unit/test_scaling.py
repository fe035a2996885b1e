"""How many workers a pool should have, by its load and by the size that it has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.domain.scaling import QueueLoad, served_queues, slots_needed, wanted_workers
from tests.support.patient import patient


def load(due: int = 0, running: int = 0, seconds: float | None = 1.0, slots: int | None = 4) -> QueueLoad:
    return QueueLoad(due, running, 0.0, seconds, slots)


def wanted(*loads: QueueLoad, present: int = 0, least: int = 0, most: int = 100, target_wait: float = 10.0) -> int:
    named = {str(number): one for number, one in enumerate(loads)}
    return wanted_workers(named, target_wait=target_wait, present=present, least=least, most=most)


def test_labels_add_the_queues_that_are_pinned_to_them() -> None:
    assert served_queues(frozenset({"a", "b@x"}), ("y", "z")) == {"a", "b@x", "a@y", "a@z"}


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        (load(), 0),
        (load(running=3), 3),
        (load(due=100, seconds=1.0), 10),  # 100 tasks of a second, each started within ten seconds
        (load(due=100, running=8, seconds=1.0), 18),
        (load(due=5, seconds=60.0), 5),  # never more slots than tasks
        (load(due=5, seconds=None), 5),  # nothing runs: each counts as long as the wait that is aimed at
    ],
)
def test_the_slots_that_a_load_needs(given: QueueLoad, slots: float) -> None:
    assert slots_needed(given, 10.0) == pytest.approx(slots)


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (0, 5),  # grows to what suffices
        (4, 5),
        (5, 5),
        (6, 6),  # neither too few nor far too many: it stays
        (7, 7),
        (8, 8),
        (9, 8),  # shrinks to where the load fills 70 % of the slots
        (50, 8),
    ],
)
def test_a_pool_stays_as_it_is_while_its_size_does(present: int, expected: int) -> None:
    assert wanted(load(due=100, running=10), present=present) == expected


def test_an_idle_pool_shrinks_to_its_least_size() -> None:
    assert wanted(load(), present=7) == 0
    assert wanted(load(), present=7, least=2) == 2
    assert wanted(present=7) == 0


def test_no_pool_is_larger_than_its_bound() -> None:
    assert wanted(load(due=10_000, running=400), present=3, most=20) == 20


def test_the_first_worker_shows_how_much_a_worker_can_do() -> None:
    assert wanted(load(due=5000, slots=None)) == 1
    assert wanted(load(due=5000, slots=None), least=3) == 3
    assert wanted(load(slots=None)) == 0


def test_work_whose_slots_are_unknown_keeps_the_pool_as_it_is() -> None:
    assert wanted(load(due=5000, slots=None), load(running=4), present=1) == 1
    assert wanted(load(due=5000, slots=None), load(running=4), present=9, most=6) == 6


def test_queues_share_the_workers_of_their_pool() -> None:
    assert wanted(load(running=4), load(running=128, slots=128)) == 2


loads = st.builds(
    load, st.integers(0, 10_000), st.integers(0, 5000), st.none() | st.floats(0, 1e6), st.integers(1, 128)
)


@patient
@given(loads, st.integers(0, 200), st.integers(0, 5), st.floats(1, 3600))
def test_a_size_that_was_taken_is_kept_by_the_same_load(
    given: QueueLoad, present: int, least: int, target_wait: float
) -> None:
    first = wanted(given, present=present, least=least, target_wait=target_wait)
    assert least <= first <= 100
    assert wanted(given, present=first, least=least, target_wait=target_wait) == first


@patient
@given(loads, st.integers(0, 100), st.integers(1, 1000))
def test_more_work_never_asks_for_fewer_workers(given: QueueLoad, present: int, more: int) -> None:
    grown = load(given.due + more, given.running, given.attempt_seconds, given.slots)
    assert wanted(grown, present=present) >= wanted(given, present=present)
