"""Paces an operation: its rate, how many jobs a batch may have at that rate, and when the next job may be acted on."""

from __future__ import annotations

from leasehold.pipelines.operations.pipeline import Action
from leasehold.settings import Settings

#: An operation that is late makes up for this many seconds at most. Without that, it would lose the time of each batch,
#: and of each sleep that takes a little too long. After a longer pause it does not hurry.
CATCH_UP_SECONDS = 0.1


def rate_of(action: Action, rate: int | None, settings: Settings) -> int:
    """The most jobs a second of an operation. `rate`: the one that its submitter named. Without one, a retry is slower
    than other operations may be: each retried job runs, and so takes time from the jobs of others.
    """
    if rate is None and action == "retry":
        rate = settings.operation_retry_rate or None
    return min(rate or settings.operation_rate, settings.operation_rate)


def largest_batch(rate: int) -> int:
    """The most jobs of one batch. At a low rate the jobs of a tenth of a second, at a high rate those of a fiftieth. So
    the workers get the retried jobs evenly, and not in bursts that the jobs of others would meet.
    """
    return max(rate // 50, min(rate // 10, 20), 1)


def next_time(previous: float, now: float, jobs: int, rate: int) -> float:
    """When the next job may be acted on, after `jobs` jobs. `previous`: when these might be acted on; 0: they are the
    first. All are Unix times.
    """
    begin = max(previous, now - CATCH_UP_SECONDS) if previous else now
    return begin + jobs / rate
