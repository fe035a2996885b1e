"""Chooses the size of the next batch of a bulk operation, which cancels, retries or deletes many jobs. The batch should
hold its locks for about BATCH_SECONDS.
"""

from __future__ import annotations

#: The time for which a batch should hold its locks.
BATCH_SECONDS = 0.01
#: A batch of at most SMALL_BATCH jobs may hold its locks for this long. Each batch has about ten statements. On a busy
#: machine these statements take most of the time, so a batch of one job is hardly shorter than a batch of twenty.
SMALL_BATCH, SMALL_BATCH_SECONDS = 20, 0.04
#: The largest number of jobs in a batch, and the number of jobs in the first batch.
MAX_BATCH, _FIRST_BATCH = 100, 8
#: A faster batch multiplies the estimated time of one job by this factor. But the estimate never becomes shorter than
#: the time that the batch itself took for one job.
_DECAY = 0.9


class BatchSize:
    """The size of the next batch (`jobs`), chosen by an estimate of the seconds for one job. A slower batch raises the
    estimate at once to its own seconds for one job. A faster batch lowers the estimate only a little, because during a
    checkpoint of PostgreSQL most batches are slow. If only the last batch counted, one fast batch among the slow ones
    would double the next batch.
    """

    def __init__(self) -> None:
        self.jobs = _FIRST_BATCH
        self._seconds_of_job = 0.0

    def record_batch(self, jobs: int, seconds: float) -> None:
        """Record that a batch of `jobs` held its locks for `seconds`."""
        self._seconds_of_job = max(seconds / jobs, _DECAY * self._seconds_of_job)
        self.jobs = max(1, min(self._jobs_in_time(), 2 * self.jobs, MAX_BATCH))  # at most twice the last size

    def _jobs_in_time(self) -> int:
        """How many jobs a batch may have, to take at most BATCH_SECONDS. A batch of up to SMALL_BATCH jobs may take
        SMALL_BATCH_SECONDS.
        """
        if not self._seconds_of_job:
            return MAX_BATCH
        jobs = int(BATCH_SECONDS / self._seconds_of_job)
        return max(jobs, min(int(SMALL_BATCH_SECONDS / self._seconds_of_job), SMALL_BATCH))

    def record_refusal(self, jobs: int) -> None:
        """Record that a batch of `jobs` exceeded a limit of the tenant. The next batch has half as many jobs."""
        self.jobs = max(jobs // 2, 1)
