"""Paces an operation: when its next job may be acted on, by the operation's rate."""

from __future__ import annotations

#: An operation that is late makes up for this many seconds at most. Without that, it would lose the time of each batch,
#: and of each sleep that takes a little too long. After a longer pause it does not hurry.
CATCH_UP_SECONDS = 0.1


def next_time(previous: float, now: float, jobs: int, rate: int) -> float:
    """When the next job may be acted on, after `jobs` jobs. `previous`: when these might be acted on; 0: they are the
    first. All are Unix times.
    """
    begin = max(previous, now - CATCH_UP_SECONDS) if previous else now
    return begin + jobs / rate
