from __future__ import annotations

import random
from datetime import timedelta

from leasehold.domain.backoff import DEFAULT_LADDER, delay_after, delay_after_answer


def test_delays_climb_the_ladder_and_stay_on_its_top() -> None:
    rng = random.Random(1)
    for failures, rung in [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (99, 3)]:
        for _ in range(200):
            delay = delay_after(failures, DEFAULT_LADDER, rng)
            assert DEFAULT_LADDER[rung] / 2 <= delay <= DEFAULT_LADDER[rung]


def test_failures_that_came_together_do_not_come_back_together() -> None:
    rng = random.Random(2)
    assert len({delay_after(1, (timedelta(minutes=1),), rng) for _ in range(100)}) == 100


def test_an_answer_may_ask_for_a_longer_delay_and_not_for_a_shorter_one() -> None:
    ladder = (timedelta(minutes=1), timedelta(minutes=5))
    assert delay_after_answer(3600.0, 1, ladder) == timedelta(hours=1)
    for retry_after in (0.0, None):
        assert delay_after_answer(retry_after, 2, ladder) >= timedelta(minutes=2.5)
