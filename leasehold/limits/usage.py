"""The bounds on a tenant's unfinished jobs and stored bytes. Admission checks both bounds for each submission.

To count all jobs and bytes of a tenant costs more than a submission. So a process remembers the counts of each tenant,
and adds the jobs and bytes that it admits itself. It counts again after a pause, which is longer if the last count took
longer. To a new count the process adds the jobs that it has admitted within the last seconds, because the transactions
of these jobs may not have been committed when PostgreSQL counted.

Near the bound on jobs, a remembered count is not exact enough. There the process counts the tenant's unfinished jobs at
each submission, and again after the write, under a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from leasehold.db.database import Connection, ConnectionSource, lock_name
from leasehold.domain.errors import Invalid, TooMany
from leasehold.runtime.duty_cycle import pause_after
from leasehold.settings import Settings

#: A process spends at most this fraction of its time on counting for one tenant.
_COUNTING_SHARE = 0.05
#: The shortest and the longest pause between two counts of a tenant, in seconds.
_LEAST_PAUSE, _LONGEST_PAUSE = 0.05, 60.0
#: A job that was admitted more than this many seconds ago is committed by now, and a count contains it.
_COMMIT_SECONDS = 2.0
#: A process remembers the counts of at most this many tenants.
_MAX_TENANTS = 10_000
#: If the bound is at most this many jobs, the jobs are counted at every submission. With a larger bound, the jobs are
#: counted at every submission once the tenant has used this fraction of the bound.
_ALWAYS_EXACT_JOBS, _EXACT_FROM_SHARE = 10_000, 0.8
#: Seconds after which a refused client should try again. The wait for stored bytes is long, because only a deletion or
#: the end of a retention time frees bytes.
_STORAGE_WAIT, _UNFINISHED_WAIT = 3600.0, 5.0

#: If there is no bound on jobs, `measure` counts unfinished jobs up to this number.
_MAX_COUNTED = 1_000_000

# $1: the tenant. $2: count up to this number.
_COUNT_JOBS = (
    "SELECT count(*) FROM (SELECT 1 FROM job WHERE tenant_id = $1 AND finished_at IS NULL LIMIT $2) AS counted"
)

# The table `gate` has the concurrency limits.
_TENANT_COUNTS = """
-- tenant_things
SELECT (SELECT count(*) FROM template WHERE tenant_id = $1) AS templates,
       (SELECT count(*) FROM schedule WHERE tenant_id = $1) AS schedules,
       (SELECT count(*) FROM webhook WHERE tenant_id = $1) AS webhooks,
       (SELECT count(*) FROM gate WHERE tenant_id = $1 AND declared) AS limits,
       (SELECT count(*) FROM api_key WHERE tenant_id = $1 AND revoked_at IS NULL
          AND (expires_at IS NULL OR expires_at > statement_timestamp())) AS keys
"""

# $1: the tenant. `of_kinds`: the sum of the queries of the kinds of work (`stored_queries` of Usage).
_BYTES = """
-- stored_bytes
SELECT ((SELECT coalesce(sum(size), 0) FROM output WHERE tenant_id = $1){of_kinds})::bigint
"""


@dataclass(slots=True)
class _RecentAdmissions:
    """Counts the jobs that were admitted in the last _COMMIT_SECONDS. The count may also contain older jobs.

    `current`: the number of jobs of the current period, which began at `since`. `earlier`: the number of jobs of the
    previous period. A period lasts at least _COMMIT_SECONDS.
    """

    earlier: int = 0
    current: int = 0
    since: float = 0.0  # by the monotonic clock, as all times here

    def add(self, count: int, at: float) -> None:
        self._rotate(at)
        self.current += count

    def sum(self, at: float) -> int:
        self._rotate(at)
        return self.earlier + self.current

    def _rotate(self, at: float) -> None:
        # Begin a new period if the current period is over.
        if at - self.since >= _COMMIT_SECONDS:
            self.earlier = self.current if at - self.since < 2 * _COMMIT_SECONDS else 0
            self.current, self.since = 0, at


@dataclass(slots=True)
class _Usage:
    """`jobs` and `stored_bytes`: the last counts of one tenant, plus the jobs and bytes that this process has admitted
    since. `fresh_until`: when PostgreSQL must count again. `admitted_jobs`, `admitted_bytes`: the sums of all that this
    process has ever admitted by remembered counts. `is_counting`: a submission is counting again at this moment.
    """

    jobs: int = 0
    stored_bytes: int = 0
    fresh_until: float | None = None  # None: never counted
    is_counting: bool = False
    admitted_jobs: int = 0
    admitted_bytes: int = 0
    recent: _RecentAdmissions = field(default_factory=_RecentAdmissions)


class Usage:
    """The counts that this process remembers, by tenant. A bound of 0 means no bound, and then nothing is counted.

    `stored_queries`: SQL scalar subqueries, one for each kind of work that stores bytes besides the outputs of its jobs
    (Kind.stored). Each returns a number of bytes; `$1` is the tenant.
    """

    def __init__(self, settings: Settings, stored_queries: Iterable[str]) -> None:
        self._bytes = _BYTES.format(of_kinds="".join(f"\n      + ({query})" for query in stored_queries))
        self._max_jobs = settings.unfinished_per_tenant
        self._max_bytes = settings.stored_bytes_per_tenant
        self._cache: OrderedDict[str, _Usage] = OrderedDict()

    async def reserve(self, database: Connection | ConnectionSource, tenant_id: str, count: int, size: int = 0) -> bool:
        """Check that `count` more jobs and `size` more bytes fit within the bounds, and add both to the remembered
        counts. `database`: a connection, or a source of connections.

        Returns whether the tenant is far from its bound on jobs. If it is not, the caller must call `check_exactly`
        after the write, because concurrent submissions may have used the same room. Raises TooMany `storage_full` or
        `too_many_unfinished`, and Invalid `batch_too_large`.
        """
        if not (self._max_jobs or self._max_bytes):
            return True
        usage = self._usage_of(tenant_id)
        # While one submission counts again, the others use the old counts, and add to them.
        if usage.fresh_until is None or (usage.fresh_until <= monotonic() and not usage.is_counting):
            await self._recount(database, tenant_id, usage)
        self._check_bytes(usage, size)
        is_far = not self._max_jobs or await self._reserve_jobs(database, tenant_id, usage, count)
        self._check_bytes(usage, size)  # again, because other submissions were admitted meanwhile
        usage.stored_bytes += size
        usage.admitted_bytes += size
        return is_far

    def _usage_of(self, tenant_id: str) -> _Usage:
        usage = self._cache.get(tenant_id)
        if usage is None:
            usage = self._cache[tenant_id] = _Usage()
            if len(self._cache) > _MAX_TENANTS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(tenant_id)
        return usage

    def _check_bytes(self, usage: _Usage, size: int) -> None:
        if self._max_bytes and size > self._max_bytes:
            sentence = f"{size} bytes exceed the {self._max_bytes} stored bytes of a tenant and can never be accepted."
            raise Invalid("batch_too_large", f"{sentence} Send less at once.")
        # A tenant that has used all its bytes may submit nothing, because even jobs without inputs write outputs.
        if self._max_bytes and (usage.stored_bytes >= self._max_bytes or usage.stored_bytes + size > self._max_bytes):
            raise TooMany(
                "storage_full",
                f"This tenant has stored {usage.stored_bytes} of at most {self._max_bytes} bytes, and {size} more do"
                " not fit until objects expire or are deleted.",
                policy="stored-bytes",
                at_most=self._max_bytes,
                retry_after=_STORAGE_WAIT,
            )

    async def _reserve_jobs(
        self, database: Connection | ConnectionSource, tenant_id: str, usage: _Usage, count: int
    ) -> bool:
        # Does the part of `reserve` that concerns the jobs, and returns what `reserve` returns. Far from the bound, the
        # remembered count decides. Near the bound, PostgreSQL counts.
        if count > self._max_jobs:
            sentence = (
                f"{count} jobs exceed the {self._max_jobs} unfinished jobs of a tenant and can never be accepted."
            )
            raise Invalid("batch_too_large", f"{sentence} Send fewer at once.")
        may_use_memory = self._max_jobs > _ALWAYS_EXACT_JOBS
        if may_use_memory and usage.jobs + count <= _EXACT_FROM_SHARE * self._max_jobs:
            usage.jobs += count
            usage.admitted_jobs += count
            usage.recent.add(count, monotonic())
            return True
        if await self._count_jobs(database, tenant_id) + count > self._max_jobs:
            raise _too_many(self._max_jobs)
        return False

    async def check_exactly(self, connection: Connection, tenant_id: str) -> None:
        """Check the bound on jobs after the write, under a lock of the tenant. Raises TooMany `too_many_unfinished`."""
        if not self._max_jobs:
            return
        await lock_name(connection, f"unfinished {tenant_id}")
        if await self._count_jobs(connection, tenant_id) > self._max_jobs:
            raise _too_many(self._max_jobs)

    async def measure(self, connection: Connection, tenant_id: str) -> dict[str, int]:
        """The tenant's counts and bounds; 0: there is no bound. Unfinished jobs are counted up to their bound only."""
        jobs = int(await connection.fetchval(_COUNT_JOBS, tenant_id, self._max_jobs or _MAX_COUNTED))
        row = await connection.fetchrow(_TENANT_COUNTS, tenant_id)
        assert row is not None
        return {
            "unfinished_jobs": jobs,
            "max_unfinished_jobs": self._max_jobs,
            "stored_bytes": int(await connection.fetchval(self._bytes, tenant_id)),
            "max_stored_bytes": self._max_bytes,
            **row,
        }

    async def _recount(self, database: Connection | ConnectionSource, tenant_id: str, usage: _Usage) -> None:
        """Count the tenant's jobs and bytes, and decide when the next count is due."""
        usage.is_counting = True
        try:
            async with _connection(database) as connection:
                started_at = monotonic()
                recent, jobs_before, bytes_before = (
                    usage.recent.sum(started_at),
                    usage.admitted_jobs,
                    usage.admitted_bytes,
                )
                jobs = await self._count_jobs(connection, tenant_id) if self._max_jobs else 0
                stored_bytes = await connection.fetchval(self._bytes, tenant_id) if self._max_bytes else 0
                now = monotonic()
        finally:
            usage.is_counting = False
        # PostgreSQL's count may lack two groups. First: jobs that were admitted shortly before it (`recent`), if their
        # transactions were not committed yet. Second: jobs and bytes that were admitted while PostgreSQL counted,
        # however long this took.
        usage.jobs = jobs + recent + usage.admitted_jobs - jobs_before
        usage.stored_bytes = stored_bytes + usage.admitted_bytes - bytes_before
        pause = pause_after(now - started_at, share=_COUNTING_SHARE, at_least=_LEAST_PAUSE, at_most=_LONGEST_PAUSE)
        usage.fresh_until = now + pause

    async def _count_jobs(self, database: Connection | ConnectionSource, tenant_id: str) -> int:
        async with _connection(database) as connection:
            return int(await connection.fetchval(_COUNT_JOBS, tenant_id, self._max_jobs + 1))


@asynccontextmanager
async def _connection(database: Connection | ConnectionSource) -> AsyncIterator[Connection]:
    """Gives the block a connection: `database` itself if it is one, or else a connection that is acquired from
    `database`.
    """
    if isinstance(database, asyncpg.Connection | PoolConnectionProxy):
        yield database
    else:
        async with database.acquire() as connection:
            yield connection


def _too_many(at_most: int) -> TooMany:
    sentence = (
        f"A tenant may have at most {at_most} unfinished jobs, and this request would exceed that number: try again"
        " later."
    )
    return TooMany("too_many_unfinished", sentence, policy="unfinished", at_most=at_most, retry_after=_UNFINISHED_WAIT)
