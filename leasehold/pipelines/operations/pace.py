"""Computes a bulk operation's rate, the size of a batch at that rate, and the time of the next batch."""

from __future__ import annotations

from leasehold.pipelines.operations.pipeline import Action
from leasehold.settings import Settings

#: An operation that is late may act faster than its rate, until it has made up for at most this many seconds. So it
#: keeps its rate, although each batch takes time and each sleep lasts a little too long. After a longer pause, the
#: operation does not make up for the rest of it.
CATCH_UP_SECONDS = 0.1


def rate_of(action: Action, rate: int | None, settings: Settings) -> int:
    """The most jobs on which an operation may act in a second. `rate`: the rate that its submitter named; None: the
    submitter named no rate. The result is never above the rate of the settings (`operation_rate`).

    Without a named rate, a retry may have a lower rate than other operations (`operation_retry_rate`). The reason: the
    retried jobs run, and so take time from the jobs of others.
    """
    if rate is None and action == "retry":
        rate = settings.operation_retry_rate or None
    return min(rate or settings.operation_rate, settings.operation_rate)


def largest_batch(rate: int) -> int:
    """How many jobs one batch may have; at least 1. Up to 1000 jobs a second, these are the jobs that the rate allows
    in a tenth of a second, but at most 20. Above, they are the jobs that the rate allows in a fiftieth of a second.
    Larger batches of retried jobs would make the jobs of others wait.
    """
    return max(rate // 50, min(rate // 10, 20), 1)


def pause_before(next_at: float, now: float, rate: int) -> float:
    """Seconds until the operation may act on the next job. If the result is 0 or less, it may act now. `next_at`: what
    `next_time` returned. The pause is at most as long as after a batch of `largest_batch` jobs. Without this bound, a
    `next_at` from a clock that was ahead could make the operation wait for hours.
    """
    return min(next_at - now, largest_batch(rate) / rate)


def next_time(previous: float, now: float, jobs: int, rate: int) -> float:
    """The Unix time at which the operation may act on the next job, after a batch of `jobs` jobs at the time `now`.
    `previous`: what this function returned after the previous batch; 0: this is the first batch.
    """
    begin = max(previous, now - CATCH_UP_SECONDS) if previous else now
    return begin + jobs / rate
