"""What a tenant's submissions must pass, whichever way they come in: the one place that charges and counts them.

    async with connection.transaction():
        async with admission.submitting(connection, payer, queues_of(tenant, pipeline)) as paid:
            ... write the jobs ...

A submission is charged in the transaction of what it pays for: what is refused or fails costs nothing, and a repeated
request that is answered from its idempotency key is not charged again. Locks are taken in one order: the rates' rows
first, before anything is written, then those of the depths, last of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

from leasehold.db import run_reads
from leasehold.db.database import Connection, Lender, lock_name
from leasehold.domain.errors import Invalid, TooMany
from leasehold.domain.pipeline import Pipeline, pinned_queue
from leasehold.limits import rates
from leasehold.limits.rates import Quota
from leasehold.limits.upload_room import UploadRoom
from leasehold.limits.usage import Usage
from leasehold.settings import Settings
from leasehold.transitions.jobs import external_queue

#: What is counted by itself: jobs, and what is uploaded before there is a job.
What = Literal["submissions", "uploads"]
#: A full queue is worth another look after this.
_SHED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Payer:
    """Who is charged. `key`: the quota key of the API key; None: no key's doing, a schedule's tick for example."""

    tenant_id: str
    key: str | None = None


@dataclass(slots=True)
class Paid:
    """`fields`: the RateLimit fields of the answer. `queues`: those that what was written waits in."""

    fields: dict[str, str]
    queues: set[str] = field(default_factory=set)


def queues_of(tenant_id: str, pipeline: Pipeline, pin: str | None = None) -> dict[str, int]:
    """How many tasks a new job of the pipeline puts into which queue at once."""
    return Counter(
        external_queue(tenant_id, step.queue) if step.external else pinned_queue(step.queue, pin)
        for step in pipeline.steps
        if not step.needs and not step.part
    )


class Admission:
    """The bounds of this installation. `usage` remembers, for a moment, what tenants have."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._usage = Usage(settings)
        self.upload_room = UploadRoom(settings.upload_unfinished_bytes)

    async def is_open(self, pool: Lender, tenant_id: str) -> bool:
        """Whether a single run needs no `submitting`: no rate and no depth is set, and the tenant is far from its
        bounds. It is counted with this. Raises as `submitting`.
        """
        settings = self._settings
        if settings.queue_depth_limit or settings.submissions_per_key or settings.submissions_per_tenant:
            return False
        return await self._usage.is_far(pool, tenant_id, 1)

    @asynccontextmanager
    async def submitting(
        self, connection: Connection, payer: Payer, queues: Mapping[str, int], count: int = 1, *, size: int = 0
    ) -> AsyncIterator[Paid]:
        """Around the writing of `count` jobs, each with so many tasks in `queues`; in the caller's transaction.
        `size`: bytes that are kept with them.

        Raises TooMany `rate_limited`, `queue_full`, `too_many_unfinished` or `storage_full`, and Invalid
        `batch_too_large` for what no waiting would let in.
        """
        paid = Paid(await self.charge(connection, payer, count), set(queues))
        await self._check_depth(connection, queues, count)
        exactly = not await self._usage.is_far(connection, payer.tenant_id, count, size)
        yield paid
        if exactly:
            await self._usage.check_exactly(connection, payer.tenant_id)
        await self._hold_depth(connection, paid.queues)

    async def check(
        self, connection: Connection, payer: Payer, queues: Mapping[str, int], what: What = "submissions"
    ) -> None:
        """Whether one submission would pass now; nothing is charged. For requests whose body is long in coming.

        Raises as `submitting`.
        """
        for key, per_minute in self._rates(payer, what):
            quota = await rates.look(connection, key, per_minute)
            if not quota.allowed:
                raise _rate_limited(quota, what)
        await self._check_depth(connection, queues, 1)
        await self._usage.is_far(connection, payer.tenant_id, 0)

    async def charge(
        self, connection: Connection, payer: Payer, count: int = 1, what: What = "submissions"
    ) -> dict[str, str]:
        """The RateLimit fields. Raises TooMany `rate_limited`: then roll back, for another rate may be charged.

        Raises Invalid `batch_too_large` for more than a minute's share.
        """
        quotas = []
        for key, per_minute in self._rates(payer, what):
            if count > per_minute:
                said = f"{count} together are more than the {per_minute} {what} of a minute: they can never be let in."
                raise Invalid("batch_too_large", f"{said} Ask for fewer at once.")
            quota = await rates.take(connection, key, per_minute, count)
            if not quota.allowed:
                raise _rate_limited(quota, what)
            quotas.append(quota)
        return _fields(min(quotas, key=lambda quota: quota.remaining), what) if quotas else {}

    async def uploading(self, connection: Connection, payer: Payer) -> dict[str, str]:
        """As `charge`, for one upload that begins. Raises TooMany `storage_full`, too."""
        await self._usage.is_far(connection, payer.tenant_id, 0)
        return await self.charge(connection, payer, 1, "uploads")

    async def keeping(self, connection: Connection, tenant_id: str, size: int) -> None:
        """Whether so many bytes more may be kept for the tenant. Raises TooMany `storage_full`."""
        await self._usage.is_far(connection, tenant_id, 0, size)

    async def refund(self, connection: Connection, payer: Payer, count: int = 1, what: What = "submissions") -> None:
        """Give back what was charged for something that was not written after all."""
        for key, per_minute in self._rates(payer, what):
            await rates.give_back(connection, key, per_minute, count)

    def _rates(self, payer: Payer, what: What) -> list[tuple[str, int]]:
        of = "submit" if what == "submissions" else "upload"
        mine = (
            (f"{of}:key:{payer.key}", self._settings.submissions_per_key if payer.key is not None else None),
            (f"{of}:tenant:{payer.tenant_id}", self._settings.submissions_per_tenant),
        )
        return [(key, per_minute) for key, per_minute in mine if per_minute is not None]

    async def _check_depth(self, connection: Connection, queues: Mapping[str, int], count: int) -> None:
        most = self._settings.queue_depth_limit
        if most is None:
            return
        for queue, tasks in queues.items():
            more = tasks * count
            if more > most:
                said = f"{more} tasks are more than the {most} that may wait in a queue: they can never be let in."
                raise Invalid("batch_too_large", f"{said} Ask for fewer at once.")
            if await run_reads.depth(connection, queue, most) + more > most:
                raise _queue_full(most)

    async def _hold_depth(self, connection: Connection, queues: Collection[str]) -> None:
        """After the writing, one submission after another: whoever looked at the same time sees the other's tasks."""
        most = self._settings.queue_depth_limit
        if most is None:
            return
        for queue in sorted(queues):
            await lock_name(connection, f"depth {queue}")
            if await run_reads.depth(connection, queue, most + 1) > most:
                raise _queue_full(most)


def _fields(quota: Quota, what: What) -> dict[str, str]:
    return {
        "RateLimit-Policy": f'"{what}";q={quota.limit};w=60',
        "RateLimit": f'"{what}";r={quota.remaining};t=60',
    }


def _rate_limited(quota: Quota, what: What) -> TooMany:
    said = f"At most {quota.limit} {what} a minute."
    return TooMany("rate_limited", said, policy=what, most=quota.limit, window=60, retry_after=quota.wait)


def _queue_full(most: int) -> TooMany:
    said = f"At most {most} tasks may wait in the queue: try again later."
    return TooMany("queue_full", said, policy="queue", most=most, retry_after=_SHED_SECONDS)


async def queues_waited_in(connection: Connection, job_id: UUID) -> set[str]:
    """Where the runnable tasks of a job wait, that was replayed for example."""
    rows = await connection.fetch(
        "SELECT DISTINCT queue FROM task WHERE job_id = $1 AND status IN ('pending', 'retry', 'waiting')", job_id
    )
    return {row["queue"] for row in rows}
