"""The rates of the last hour, for the Overview: how many jobs were created, how many of them failed, and how long they
waited and ran. An operator gets the rates of all tenants. The hour has twelve parts of five minutes. The page reads
only the newest jobs of each part (the sample).

If a part has more jobs than SAMPLE, `_part` estimates their number from the time that the sample covers. So the page
reads the same number of rows among ten million jobs as among ten thousand.

The hour ends at the end of the current minute. So two answers within one minute are usually equal. They differ if a job
was created, started or ended between them, or if the last part is estimated. After an equal answer, an open page is not
rendered again (rendering.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from leasehold.api.jobs.lists import scope_of
from leasehold.api.process.keyring import Caller
from leasehold.api.process.services import Services
from leasehold.db import job_lists
from leasehold.db.job_lists import Listing, Page
from leasehold.domain.job_filter import JobFilter
from leasehold.domain.states import JobState

#: The number of parts of the hour, and the most jobs in the sample of a part.
PARTS, SAMPLE = 12, 80
_PART_LENGTH, _MINUTE = timedelta(minutes=5), timedelta(minutes=1)
#: The largest number of rows that the query of a part may read. A job counts as three rows (`_ROWS_PER_JOB` of
#: job_lists.py), so this is 160 jobs. This is two times SAMPLE, because the query also reads jobs past their retention,
#: which the sample leaves out.
_MAX_READ = 480
#: The sample covers a fraction of the part's five minutes, and `_part` divides by this fraction. If the fraction is
#: smaller than _MIN_COVERED, `_part` divides by _MIN_COVERED instead, and so never by 0. This also limits the rate that
#: the page can show to 26,000 jobs a second, because 80 jobs in 0.003 seconds (_MIN_COVERED of five minutes) are the
#: most that `_part` can count.
_MIN_COVERED = 0.00001


@dataclass(frozen=True, slots=True)
class Part:
    """Five minutes of the hour. `at`: their start. `n`: the number of jobs that were created in them. `failed`: how
    many of these jobs have failed by now. `exact`: whether the numbers are counted, and not estimated.
    """

    at: datetime
    n: int
    failed: int
    exact: bool


@dataclass(frozen=True, slots=True)
class Rates:
    """`waits`: how long jobs waited for their start. `runs`: how long they ran. Both are the median and the 95th
    percentile, in seconds. None: no job of the samples has such a time.
    """

    parts: Sequence[Part]
    waits: tuple[float, float] | None
    runs: tuple[float, float] | None

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def failed(self) -> int:
        return sum(part.failed for part in self.parts)

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)

    @property
    def highest(self) -> int:
        """The scale of the drawing: the number of jobs of the largest part, and at least 1."""
        return max([part.n for part in self.parts] + [1])


async def rates_of(services: Services, caller: Caller, now: datetime) -> Rates:
    end = now.replace(second=0, microsecond=0) + _MINUTE
    # Read the sample of each part, the oldest part first.
    parts, waits, runs = [], [], []
    async with services.pool.acquire() as connection, connection.transaction(readonly=True):
        for number in range(PARTS, 0, -1):
            start = end - number * _PART_LENGTH
            job_filter = JobFilter(created_after=start, created_before=start + _PART_LENGTH)
            scope = scope_of(services, caller, job_filter)
            if scope is None:  # the caller may read no jobs
                return Rates([], None, None)
            job_page = await job_lists.page_of_times(connection, Listing(scope, job_filter, max_read=_MAX_READ), SAMPLE)
            parts.append(_part(start, min(start + _PART_LENGTH, now), job_page))
            waits += [_seconds(row["created_at"], row["started_at"]) for row in job_page.rows if row["started_at"]]
            runs += [
                _seconds(row["started_at"], row["finished_at"])
                for row in job_page.rows
                if row["started_at"] and row["finished_at"]
            ]
    return Rates(parts, _percentiles(waits), _percentiles(runs))


def _part(start: datetime, end: datetime, job_page: Page) -> Part:
    """The part, with counted or estimated numbers. `end`: the end of the part, or now if the part is not over yet.
    `job_page`: the sample.
    """
    n, failed = len(job_page.rows), sum(row["status"] == JobState.FAILED for row in job_page.rows)
    # `ended_at`: the job at which the query stopped, because it had read _MAX_READ rows.
    has_all_jobs = not job_page.has_more and job_page.ended_at is None
    if not n or has_all_jobs:  # without a job, nothing can be estimated
        return Part(start, n, failed, exact=has_all_jobs)
    # The sample has the newest jobs, so it covers the time from its oldest job to the end of the part. A job may be
    # newer than `end`, because it was created while this process read, or because this process's clock is behind
    # PostgreSQL's.
    end = max(end, job_page.rows[0]["created_at"])
    covered_share = max((end - job_page.rows[-1]["created_at"]) / (end - start), _MIN_COVERED)
    return Part(start, round(n / covered_share), round(failed / covered_share), exact=False)


def _seconds(start: datetime, end: datetime) -> float:
    return max(0.0, (end - start).total_seconds())


def _percentiles(values: list[float]) -> tuple[float, float] | None:
    """The median and the 95th percentile. None: there are no values."""
    values.sort()
    return (values[len(values) // 2], values[int(len(values) * 0.95)]) if values else None
