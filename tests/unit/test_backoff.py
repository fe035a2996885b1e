from __future__ import annotations

import random
from datetime import timedelta

from leasehold.domain.backoff import DEFAULT_LADDER, capped, delay_after, delay_after_answer


def test_delays_climb_the_ladder_and_stay_on_its_top() -> None:
    rng = random.Random(1)
    for failures, rung in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (99, 3)]:
        for _ in range(200):
            delay = delay_after(failures, DEFAULT_LADDER, rng)
            assert DEFAULT_LADDER[rung] / 2 <= delay <= DEFAULT_LADDER[rung]


def test_failures_that_came_together_do_not_come_back_together() -> None:
    rng = random.Random(2)
    assert len({delay_after(1, (timedelta(minutes=1),), rng) for _ in range(100)}) == 100
    assert len({delay_after(1, (timedelta(minutes=1),)) for _ in range(100)}) > 1
    assert len({delay_after(1, DEFAULT_LADDER, random.Random(3)) for _ in range(100)}) == 1


def test_a_step_that_declares_no_delays_is_tried_again_after_a_minute_then_five_then_thirty_then_two_hours() -> None:
    assert [rung.total_seconds() for rung in DEFAULT_LADDER] == [60, 300, 1800, 7200]


def test_a_delay_that_reaches_the_end_of_time_is_cut() -> None:
    assert [capped(seconds) for seconds in (0.0, 5.0, 1e300)] == [0.0, 5.0, 36_500 * 86_400.0]


def test_an_answer_may_ask_for_a_longer_delay_and_not_for_a_shorter_one() -> None:
    ladder = (timedelta(minutes=1), timedelta(minutes=5))
    assert delay_after_answer(3600.0, 1, ladder) == timedelta(hours=1)
    for retry_after in (0.0, None):
        assert delay_after_answer(retry_after, 2, ladder) >= timedelta(minutes=2.5)
        assert delay_after_answer(retry_after, 1, (timedelta(0),)) == timedelta(0)
