"""The size of an operation's batches follows how long they hold their locks."""

from __future__ import annotations

import pytest

from leasehold.pipelines.operations.batch_size import BATCH_SECONDS, MAX_BATCH, SMALL_BATCH, BatchSize


def test_fast_batches_grow_to_the_most_jobs_and_no_further() -> None:
    size = BatchSize()
    sizes = []
    for _ in range(6):
        size.record_batch(size.jobs, size.jobs * BATCH_SECONDS / 1000)
        sizes.append(size.jobs)
    assert sizes == [16, 32, 64, MAX_BATCH, MAX_BATCH, MAX_BATCH]


def test_a_slow_batch_shrinks_the_next_and_one_fast_batch_does_not_undo_that() -> None:
    size = BatchSize()
    for _ in range(6):
        size.record_batch(size.jobs, 0.001)
    size.record_batch(100, 4 * BATCH_SECONDS)
    assert size.jobs == 25
    size.record_batch(25, BATCH_SECONDS / 100)
    assert size.jobs == 27
    for _ in range(30):
        size.record_batch(size.jobs, BATCH_SECONDS / 100)
    assert size.jobs == MAX_BATCH


def test_a_batch_has_a_job_at_least() -> None:
    size = BatchSize()
    size.record_batch(8, 5.0)
    assert size.jobs == 1
    size.record_refusal(1)
    assert size.jobs == 1
    size.record_refusal(9)
    assert size.jobs == 4


def test_a_batch_that_took_no_time_by_the_clock_grows() -> None:
    size = BatchSize()
    size.record_batch(8, 0.0)
    assert size.jobs == 16


def jobs_a_second(seconds_of_batch: float, seconds_of_job: float) -> tuple[float, float]:
    """The jobs a second, and the longest batch after the first ten. Each batch takes so long by itself, and so much for
    each of its jobs; every second batch takes half of that, and the others one and a half of it.
    """
    size, spent, acted, longest = BatchSize(), 0.0, 0, 0.0
    for number in range(200):
        seconds = (0.5 + number % 2) * (seconds_of_batch + size.jobs * seconds_of_job)
        spent, acted = spent + seconds, acted + size.jobs
        if number >= 10:
            longest = max(longest, seconds)
        size.record_batch(size.jobs, seconds)
    return acted / spent, longest


@pytest.mark.parametrize("seconds_of_batch", [0.001, 0.007, 0.015])
def test_a_batch_does_not_shrink_where_fewer_jobs_would_take_as_long(seconds_of_batch: float) -> None:
    """On a busy machine a batch of one job took 7 ms: the batches stayed at one job, and 480 jobs a second."""
    rate, longest = jobs_a_second(seconds_of_batch, 0.0002)
    assert rate > 0.9 * SMALL_BATCH / (seconds_of_batch + SMALL_BATCH * 0.0002)
    assert longest < 0.05


@pytest.mark.parametrize("seconds_of_job", [0.002, 0.01, 0.03])
def test_batches_of_jobs_that_take_long_are_small(seconds_of_job: float) -> None:
    _, longest = jobs_a_second(0.002, seconds_of_job)
    assert longest < 0.07
