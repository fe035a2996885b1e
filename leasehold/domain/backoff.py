"""Computes the delay between a failed attempt and the next attempt. A ladder is the list of the delays after the first
failure, the second failure, and so on. The computed delay has jitter (a random part), so tasks that failed at the same
time do not all run again at the same time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta

#: The ladder of steps that declare no ladder.
DEFAULT_LADDER = (
    timedelta(minutes=1),
    timedelta(minutes=5),
    timedelta(minutes=30),
    timedelta(hours=2),
)
#: The longest delay. After a longer delay, the next attempt could be due beyond the last timestamp of PostgreSQL.
LONGEST = timedelta(days=36_500)


def capped(seconds: float) -> float:
    """The delay `seconds`, but at most LONGEST (in seconds)."""
    return min(seconds, LONGEST.total_seconds())


def delay_after(failures: int, ladder: Sequence[timedelta], rng: random.Random | None = None) -> timedelta:
    """The delay between a failure of a task and its next attempt. `failures`: the number of its failures until now.

    The delay is random, between half of the ladder's delay and the whole delay. After the end of the ladder, its last
    delay repeats.
    """
    longest = ladder[min(max(failures, 1), len(ladder)) - 1]
    # A pseudo-random number is enough, because nobody gains anything by predicting it.
    return longest * (rng or random).uniform(0.5, 1.0)


def delay_after_answer(retry_after: float | None, failures: int, ladder: Sequence[timedelta]) -> timedelta:
    """The delay after a failure that another server answered. `retry_after`: the seconds in the answer's header
    Retry-After, or None. The delay is at least that of `delay_after`, because a Retry-After of 0 must not use up all
    attempts immediately.
    """
    return max(timedelta(seconds=retry_after or 0.0), delay_after(failures, ladder))
