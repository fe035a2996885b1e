"""How many jobs the next batch of an operation has: as many as hold their locks for about BATCH_SECONDS."""

from __future__ import annotations

#: A batch holds its locks about this long. A busy machine may take five times as long, which is still short.
BATCH_SECONDS = 0.01
#: The most jobs of a batch, and those of the first.
MAX_BATCH, _FIRST = 100, 8
#: What the time of one job, as it was measured, counts in the estimate of the next batch.
_REMEMBERED = 0.9


class BatchSize:
    """The size follows the slowest of the last batches, and forgets it little by little. The last batch alone would
    make the size swing: a fast batch would double the next one, in the middle of a checkpoint.
    """

    def __init__(self) -> None:
        self.jobs = _FIRST
        self._seconds_of_job = 0.0

    def measured(self, jobs: int, seconds: float) -> None:
        """A batch of `jobs` held its locks for `seconds`."""
        self._seconds_of_job = max(seconds / jobs, _REMEMBERED * self._seconds_of_job)
        fitting = int(BATCH_SECONDS / self._seconds_of_job) if self._seconds_of_job else MAX_BATCH
        self.jobs = max(1, min(fitting, 2 * self.jobs, MAX_BATCH))

    def refused(self, jobs: int) -> None:
        """A batch of `jobs` exceeded a limit of the tenant: the next one has half of them."""
        self.jobs = max(jobs // 2, 1)
