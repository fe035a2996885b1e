"""Chooses the size of an operation's next batch, so that the batch holds its locks for about BATCH_SECONDS."""

from __future__ import annotations

#: The time for which a batch should hold its locks. On a busy machine it may be five times as long, which is still
#: short.
BATCH_SECONDS = 0.01
#: The most jobs of a batch, and the jobs of the first batch.
MAX_BATCH, _FIRST_BATCH = 100, 8
#: The factor by which the estimated time of one job falls with each faster batch.
_DECAY = 0.9


class BatchSize:
    """The size follows the slowest of the last batches, and forgets it little by little. If it followed the last batch
    only, a fast batch would double the next one, perhaps during a checkpoint of PostgreSQL.
    """

    def __init__(self) -> None:
        self.jobs = _FIRST_BATCH
        self._seconds_of_job = 0.0

    def measured(self, jobs: int, seconds: float) -> None:
        """Record that a batch of `jobs` held its locks for `seconds`."""
        self._seconds_of_job = max(seconds / jobs, _DECAY * self._seconds_of_job)
        fitting = int(BATCH_SECONDS / self._seconds_of_job) if self._seconds_of_job else MAX_BATCH
        self.jobs = max(1, min(fitting, 2 * self.jobs, MAX_BATCH))

    def refused(self, jobs: int) -> None:
        """Record that a batch of `jobs` exceeded a limit of the tenant. The next batch has half as many."""
        self.jobs = max(jobs // 2, 1)
