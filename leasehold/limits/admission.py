"""Admission: the checks that every submission of a tenant passes. The API, schedules and replays call this module.

    async with connection.transaction():
        async with admission.submitting(connection, payer, queues_of(tenant, pipeline)) as paid:
            ... write the jobs ...

A submission is charged in the transaction that writes its jobs, so a refused or failed submission costs nothing. A
repetition with the same idempotency key is not charged again. All submissions take their locks in the same order, so
that they cannot deadlock. They lock first the rows of the rates, before any write, and last the depth of each queue
(how many tasks wait in the queue).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal
from uuid import UUID

from leasehold.db import run_reads
from leasehold.db.database import Connection, ConnectionSource, lock_name
from leasehold.domain.errors import Invalid, TooMany
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline
from leasehold.limits import rates
from leasehold.limits.rates import Quota
from leasehold.limits.upload_room import UploadRoom
from leasehold.limits.usage import Usage
from leasehold.settings import Settings
from leasehold.transitions import jobs
from leasehold.transitions.concurrency import FIRST_STEP_OF_HELD_JOB

#: The two rates: the rate of jobs, and the rate of uploads that begin before their job exists.
Charge = Literal["submissions", "uploads"]
#: The retry-after of a submission to a full queue.
_FULL_QUEUE_SECONDS = 5.0
_NO_PARAMS: Mapping[str, Any] = MappingProxyType({})

# $1: the ids of the jobs. `tasks`: how many of their tasks wait in the queue, or will wait there once the concurrency
# limits admit their jobs. `held`: how many of `tasks` wait only for these limits.
_QUEUES_OF_JOBS = f"""
-- queues_of_jobs
SELECT t.queue, count(*)::int AS tasks, (count(*) FILTER (WHERE t.status = 'blocked'))::int AS held
FROM task t JOIN job j ON j.id = t.job_id
WHERE t.job_id = ANY($1::uuid[])
  AND (t.status IN ('pending', 'retry', 'waiting') OR (j.held AND {FIRST_STEP_OF_HELD_JOB}))
GROUP BY t.queue
"""


@dataclass(frozen=True, slots=True)
class Payer:
    """The tenant and the API key that are charged. `key`: the name under which the API key's rate is counted; None: no
    API key is charged, for example for a schedule.
    """

    tenant_id: str
    key: str | None = None


@dataclass(slots=True)
class Paid:
    """The charge of a submission. `fields`: the RateLimit header fields for the answer. `is_single`: the submission
    writes one job. `queues`: queue -> how many written tasks wait in it. The depths of these queues are checked again
    after the write. `held`: queue -> how many of these tasks wait only for the concurrency limits of their jobs. Only
    tasks that `add_queues_of` has counted are in `held`.
    """

    fields: dict[str, str]
    is_single: bool
    queues: Counter[str]
    held: Counter[str] = field(default_factory=Counter)


def queues_of(
    tenant_id: str, pipeline: Pipeline, pin: str | None = None, params: Mapping[str, Any] = _NO_PARAMS
) -> Counter[str]:
    """Queue -> the number of tasks that a new job of the pipeline puts into it at its submission. `pin`: only workers
    with this label run the job. `params`: the job's parameters, which may skip steps (`skip_if`). Raises Invalid
    `nothing_to_do` if they skip all steps.
    """
    return Counter(jobs.queue_of(step, tenant_id, pin) for step in jobs.first_steps(pipeline, params))


def queues_of_jobs(tenant_id: str, pipeline: Pipeline, params: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """The same as `queues_of`, for several new jobs. Each element of `params` has the parameters of one job."""
    if all(step.skip_if is None for step in pipeline.steps):
        queues = queues_of(tenant_id, pipeline)
        return Counter({queue: tasks * len(params) for queue, tasks in queues.items()})
    return sum((queues_of(tenant_id, pipeline, params=one) for one in params), Counter())


class Admission:
    """The limits of this installation. Each process has one object, which remembers for a moment how much each tenant
    uses.

    `kinds`: the kinds of work. The bytes that a kind keeps for a tenant (`Kind.stored`) also count as stored bytes.
    """

    def __init__(self, settings: Settings, kinds: Iterable[Kind]) -> None:
        self._settings = settings
        # The unfinished jobs and the stored bytes of each tenant.
        self._usage = Usage(settings, [kind.stored for kind in kinds if kind.stored is not None])
        # Bounds the bytes of a tenant's unfinished uploads.
        self.upload_room = UploadRoom(settings.upload_unfinished_bytes)

    async def reserve_single_run(self, pool: ConnectionSource, tenant_id: str) -> bool:
        """A shortcut for one run, in place of `submitting`: reserve its place among the tenant's unfinished jobs.
        Returns False if the caller needs `submitting`. It is needed if the settings limit rates or queue depths, or if
        the tenant is near its bound on unfinished jobs. Raises the same errors as `submitting`.
        """
        settings = self._settings
        if settings.queue_depth_limit or settings.submissions_per_key or settings.submissions_per_tenant:
            return False
        return await self._usage.reserve(pool, tenant_id, 1)

    @asynccontextmanager
    async def submitting(
        self, connection: Connection, payer: Payer, queues: Mapping[str, int], count: int = 1, *, size: int = 0
    ) -> AsyncIterator[Paid]:
        """Enter this around the statements that write `count` jobs, in the caller's transaction. Before the block, this
        charges the rates and checks the bounds. After the block, it takes locks and checks again the bounds that
        concurrent submissions may have exceeded together.

        `queues`: queue -> the tasks of all these jobs (`queues_of`). `size`: the bytes that are stored with the jobs. A
        `count` of 0 stands for one job that has been charged already.

        Raises TooMany `rate_limited`, `queue_full`, `too_many_unfinished` or `storage_full`. Raises Invalid
        `batch_too_large` if the jobs alone exceed a limit, because then waiting cannot help. Exception: a single job
        whose tasks exceed the depth of a queue passes while no other task waits in the queue. So every job can pass at
        some time, even a retry with all the parts of a step.
        """
        paid = Paid(await self.charge(connection, payer, count), count <= 1, Counter(queues))
        await self._check_depth(connection, queues, is_single=paid.is_single)
        is_far_from_bound = await self._usage.reserve(connection, payer.tenant_id, count, size)
        yield paid
        if not is_far_from_bound:
            await self._usage.check_exactly(connection, payer.tenant_id)
        await self._check_depth_after_write(connection, paid)

    async def add_queues_of(self, connection: Connection, paid: Paid, *job_ids: UUID) -> None:
        """Add to `paid` the queues in which the jobs' tasks wait, or will wait once the concurrency limits admit the
        jobs. Call this after the write, once for each job whose queues `submitting` did not get. An example is a retry,
        because it may begin at any step.
        """
        if self._settings.queue_depth_limit is None:
            return
        for row in await connection.fetch(_QUEUES_OF_JOBS, list(job_ids)):
            paid.queues[row["queue"]] += row["tasks"]
            paid.held[row["queue"]] += row["held"]

    def check_added(self, paid: Paid) -> None:
        """Raises Invalid `batch_too_large` if the tasks of several jobs alone exceed the depth of a queue, because then
        waiting cannot help. Call this after `add_queues_of`, for a request whose client can send fewer jobs.
        """
        at_most = self._settings.queue_depth_limit
        if at_most is not None and not paid.is_single:
            _refuse_too_many_at_once(paid.queues, at_most)

    async def check(
        self, connection: Connection, payer: Payer, queues: Mapping[str, int], charged_as: Charge = "submissions"
    ) -> None:
        """Check whether one submission would pass now. Charges nothing. Call this before a long request body arrives.

        Raises the same errors as `submitting`. Exception: a tenant that has exactly reached its bound on unfinished
        jobs passes, because the submission may have the dedupe key of an existing job.
        """
        for key, per_minute in self._rates(payer, charged_as):
            quota = await rates.peek(connection, key, per_minute)
            if not quota.allowed:
                raise _rate_limited(quota, charged_as)
        await self._check_depth(connection, queues, is_single=True)
        await self._usage.reserve(connection, payer.tenant_id, 0)  # 0: only checks

    async def charge(
        self, connection: Connection, payer: Payer, count: int = 1, charged_as: Charge = "submissions"
    ) -> dict[str, str]:
        """Charge the rates, and return the RateLimit header fields. A `count` of 0 only locks the rates.

        Raises TooMany `rate_limited`. The caller must then roll back, because another rate may be charged already.
        Raises Invalid `batch_too_large` if `count` exceeds the rate of a whole minute.
        """
        quotas = []
        for key, per_minute in self._rates(payer, charged_as):
            if count > per_minute:
                sentence = (
                    f"{count} at once exceed the limit of {per_minute} {charged_as} a minute and can never be accepted."
                )
                raise Invalid("batch_too_large", f"{sentence} Send fewer at once.")
            quota = await rates.take(connection, key, per_minute, count)
            if not quota.allowed:
                raise _rate_limited(quota, charged_as)
            quotas.append(quota)
        return _header_fields(min(quotas, key=lambda quota: quota.remaining), charged_as) if quotas else {}

    async def charge_upload(self, connection: Connection, payer: Payer, size: int = 0) -> dict[str, str]:
        """The same as `charge`, for one upload that begins. `size`: the bytes that the upload stores now; 0: the client
        sends the object to the store later, and its bytes count when the upload ends. Also raises TooMany
        `storage_full`.
        """
        await self._usage.reserve(connection, payer.tenant_id, 0, size)
        return await self.charge(connection, payer, 1, "uploads")

    async def check_stored_bytes(self, connection: Connection, tenant_id: str, size: int) -> None:
        """Check that `size` more bytes may be stored for the tenant. Raises TooMany `storage_full`."""
        await self._usage.reserve(connection, tenant_id, 0, size)  # 0 jobs

    async def measure(self, connection: Connection, tenant_id: str) -> dict[str, int]:
        """The tenant's counts and bounds, by name (see `Usage.measure`)."""
        return await self._usage.measure(connection, tenant_id)

    async def refund(
        self, connection: Connection, payer: Payer, count: int = 1, charged_as: Charge = "submissions"
    ) -> None:
        """Undo a charge, because the jobs or uploads were not written."""
        for key, per_minute in self._rates(payer, charged_as):
            await rates.refund(connection, key, per_minute, count)

    def _rates(self, payer: Payer, charged_as: Charge) -> list[tuple[str, int]]:
        """For each rate that is set: the key of its row, and the number of requests a minute."""
        verb = "submit" if charged_as == "submissions" else "upload"
        rates_of_payer = (
            (f"{verb}:key:{payer.key}", self._settings.submissions_per_key if payer.key is not None else None),
            (f"{verb}:tenant:{payer.tenant_id}", self._settings.submissions_per_tenant),
        )
        return [(key, per_minute) for key, per_minute in rates_of_payer if per_minute is not None]

    async def _check_depth(self, connection: Connection, queues: Mapping[str, int], *, is_single: bool) -> None:
        """Check that each queue has room for its new tasks. `queues`: queue -> the number of its new tasks.
        `is_single`: all new tasks belong to one job.
        """
        at_most = self._settings.queue_depth_limit
        if at_most is None:
            return
        if not is_single:
            _refuse_too_many_at_once(queues, at_most)
        for queue, new_tasks in queues.items():
            # For a single job with more tasks than `at_most`, the queue has room only if no other task waits in it.
            room = max(at_most, new_tasks)
            if await run_reads.depth(connection, queue, room) + new_tasks > room:
                raise _queue_full(at_most, new_tasks if is_single else 0)

    async def _check_depth_after_write(self, connection: Connection, paid: Paid) -> None:
        """Check the depths again after the write, under a lock for each queue, because concurrent submissions must see
        the tasks of each other.
        """
        at_most = self._settings.queue_depth_limit
        if at_most is None:
            return
        for queue in sorted(paid.queues):
            await lock_name(connection, f"depth {queue}")
            tasks_of_job = paid.queues[queue] if paid.is_single else 0
            room = max(at_most, tasks_of_job)
            # `depth` does not count tasks that wait for concurrency limits. The new tasks that wait for them are in
            # `held`.
            if await run_reads.depth(connection, queue, room + 1) + paid.held[queue] > room:
                raise _queue_full(at_most, tasks_of_job)


def _header_fields(quota: Quota, charged_as: Charge) -> dict[str, str]:
    return {
        "RateLimit-Policy": f'"{charged_as}";q={quota.limit};w=60',
        "RateLimit": f'"{charged_as}";r={quota.remaining};t=60',
    }


def _rate_limited(quota: Quota, charged_as: Charge) -> TooMany:
    sentence = f"At most {quota.limit} {charged_as} a minute."
    # `policy`: the limit's name in the RateLimit header fields.
    return TooMany(
        "rate_limited", sentence, policy=charged_as, at_most=quota.limit, window=60, retry_after=quota.wait_seconds
    )


def _refuse_too_many_at_once(queues: Mapping[str, int], at_most: int) -> None:
    """Raises Invalid if the tasks of several jobs alone exceed the depth of a queue. `queues`: queue -> the number of
    tasks.
    """
    for tasks in queues.values():
        if tasks > at_most:
            sentence = f"{tasks} tasks exceed the {at_most} that may wait in a queue and can never be accepted."
            raise Invalid("batch_too_large", f"{sentence} Send fewer at once.")


def _queue_full(at_most: int, tasks_of_job: int) -> TooMany:
    """`tasks_of_job`: the number of tasks of a single job in this queue; 0: there are several jobs."""
    sentence = f"At most {at_most} tasks may wait in the queue: try again later."
    if tasks_of_job > at_most:
        sentence += f" This job has {tasks_of_job} tasks there, so it is accepted while no other task waits there."
    return TooMany("queue_full", sentence, policy="queue", at_most=at_most, retry_after=_FULL_QUEUE_SECONDS)
