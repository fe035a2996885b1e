"""When to try again: the ladder of delays, with full jitter so that failures that came together part ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta

#: The media text's ladder (its section 10): 1 m, 5 m, 30 m, 2 h.
DEFAULT_LADDER = (
    timedelta(minutes=1),
    timedelta(minutes=5),
    timedelta(minutes=30),
    timedelta(hours=2),
)


def delay_after(failures: int, ladder: Sequence[timedelta], rng: random.Random | None = None) -> timedelta:
    """The wait before the attempt that follows the `failures`-th failure (1 is the first).

    Between half of the rung and the whole of it: never at once, never all together. Past the top rung, the top.
    """
    rung = ladder[min(max(failures, 1), len(ladder)) - 1]
    # Jitter is for spreading load; nobody gains by guessing it.
    return rung * (rng or random).uniform(0.5, 1.0)
