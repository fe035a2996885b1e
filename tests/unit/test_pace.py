"""An operation has a rate, and keeps it in small batches."""

from __future__ import annotations

import pytest

from leasehold.pipelines.operations.pace import CATCH_UP_SECONDS, largest_batch, next_time, pause_before, rate_of
from leasehold.pipelines.operations.pipeline import Action
from leasehold.settings import Settings


def jobs_within(seconds: float, seconds_of_batch: float, rate: int, jobs: int = 100) -> int:
    """The jobs that an operation acts on within `seconds`, if it waits for its pace before each batch."""
    now, next_at, acted = 1000.0, 0.0, 0
    while now < 1000.0 + seconds:
        now = max(now, next_at) + seconds_of_batch
        next_at = next_time(next_at, now, jobs, rate)
        acted += jobs
    return acted


@pytest.mark.parametrize("seconds_of_batch", [0.001, 0.02, 0.045])
def test_an_operation_is_not_slower_than_its_rate_by_the_time_of_its_batches(seconds_of_batch: float) -> None:
    """Asked for 2,000 a second, an operation whose batches took 40 ms once made 1,100."""
    assert 0.98 * 20_000 <= jobs_within(10, seconds_of_batch, 2000) <= 1.02 * 20_000


def test_an_operation_whose_batches_take_longer_than_its_rate_goes_as_fast_as_it_can() -> None:
    assert jobs_within(10, 0.2, 2000) == 5000


def test_an_operation_does_not_hurry_after_a_pause() -> None:
    next_at = next_time(0.0, 1000.0, 100, 1000)
    assert next_at == 1000.1
    assert next_time(next_at, 2000.0, 100, 1000) == pytest.approx(2000.1 - CATCH_UP_SECONDS)
    assert next_time(next_at, next_at + CATCH_UP_SECONDS / 2, 100, 1000) == pytest.approx(1000.2)


@pytest.mark.parametrize(("rate", "longest"), [(1, 1.0), (20, 0.1), (1000, 0.02)])
def test_no_pause_is_longer_than_that_of_a_batch_whatever_clock_the_worker_before_had(
    rate: int, longest: float
) -> None:
    assert pause_before(1000.0 + longest, 1000.0, rate) == pytest.approx(longest)
    assert pause_before(1000.0 + 3600, 1000.0, rate) == longest
    assert pause_before(1000.0, 1000.5, rate) <= 0


@pytest.mark.parametrize(
    ("action", "rate", "expected"),
    [
        ("retry", None, 300),
        ("retry", 2, 2),
        ("retry", 900, 900),
        ("retry", 5000, 1000),
        ("cancel", None, 1000),
        ("delete", None, 1000),
        ("delete", 700, 700),
    ],
)
def test_a_retry_without_a_rate_has_a_gentle_one_and_a_named_rate_wins(
    action: Action, rate: int | None, expected: int
) -> None:
    """Retried jobs then run, beside the jobs of others. A cancel or a delete makes no work."""
    assert rate_of(action, rate, Settings(_env_file=None, operation_rate=1000, operation_retry_rate=300)) == expected


def test_zero_turns_the_gentle_rate_off() -> None:
    assert rate_of("retry", None, Settings(_env_file=None, operation_rate=1000, operation_retry_rate=0)) == 1000


@pytest.mark.parametrize(("rate", "jobs"), [(1, 1), (20, 2), (200, 20), (1000, 20), (2500, 50), (5000, 100)])
def test_the_jobs_of_a_rate_are_spread_over_each_second(rate: int, jobs: int) -> None:
    """Ten large batches a second would be ten bursts of retried jobs, which the jobs of others meet."""
    assert largest_batch(rate) == jobs
