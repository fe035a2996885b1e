"""The size of an operation's batches follows how long they hold their locks."""

from __future__ import annotations

from leasehold.pipelines.operations.batch_size import BATCH_SECONDS, MAX_BATCH, BatchSize


def test_fast_batches_grow_to_the_most_jobs_and_no_further() -> None:
    size = BatchSize()
    sizes = []
    for _ in range(6):
        size.measured(size.jobs, size.jobs * BATCH_SECONDS / 1000)
        sizes.append(size.jobs)
    assert sizes == [16, 32, 64, MAX_BATCH, MAX_BATCH, MAX_BATCH]


def test_a_slow_batch_shrinks_the_next_and_one_fast_batch_does_not_undo_that() -> None:
    size = BatchSize()
    for _ in range(6):
        size.measured(size.jobs, 0.001)
    size.measured(100, 10 * BATCH_SECONDS)
    assert size.jobs == 10
    size.measured(10, BATCH_SECONDS / 100)
    assert size.jobs == 11
    for _ in range(30):
        size.measured(size.jobs, BATCH_SECONDS / 100)
    assert size.jobs == MAX_BATCH


def test_a_batch_has_a_job_at_least() -> None:
    size = BatchSize()
    size.measured(8, 5.0)
    assert size.jobs == 1
    size.refused(1)
    assert size.jobs == 1
    size.refused(9)
    assert size.jobs == 4


def test_a_batch_that_took_no_time_by_the_clock_grows() -> None:
    size = BatchSize()
    size.measured(8, 0.0)
    assert size.jobs == 16
