"""How seldom something costly is done."""

from __future__ import annotations

import pytest

from leasehold.runtime.duty_cycle import pause_after
from leasehold.transitions.concurrency import new_search


@pytest.mark.parametrize(
    ("took", "pause"),
    [
        (0.0, 5.0),  # cheap: as often as is wished
        (0.02, 5.0),
        (0.2, 20.0),  # costly: so that it is a hundredth of the time
        (3.0, 60.0),  # but never more seldom than is promised
    ],
)
def test_what_takes_long_comes_more_seldom_within_its_bounds(took: float, pause: float) -> None:
    assert pause_after(took, share=0.01, at_least=5.0, at_most=60.0) == pytest.approx(pause)


def test_searches_for_waiting_jobs_take_a_hundredth_of_the_time_and_come_once_a_minute_at_least() -> None:
    search = new_search()
    search._clock = lambda: 1000.0
    assert search.due
    pauses = [search.done(1000.0 - seconds) for seconds in (0.2, 0.2, 0.3, 5.0, 5.0)]
    assert pauses == pytest.approx([0.0, 20.0, 20.0, 30.0, 60.0])
    assert not search.due
