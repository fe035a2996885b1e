"""The sweeper: one elected worker does what time asks for. Every statement it runs is safe to run twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TypeVar
from uuid import UUID

import structlog

from leasehold import downloads, generations, rates
from leasehold.announcer import Announcer
from leasehold.database import TRY_AGAIN, Connection, Pool
from leasehold.easing import pause_after
from leasehold.errors import StoreError
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry.jobs import jobs_ended
from leasehold.transitions import gates, sweeps, workers
from worker import metrics

_T = TypeVar("_T")
log = structlog.get_logger(__name__)

#: Lost workers, and a lost leader, are looked for this often, so that what they held runs elsewhere within a second.
_WATCH_SECONDS = 0.5
#: Leases that pass are looked for every `sweep_seconds`, but for at most this share of the time, and at the latest
#: after so many seconds.
_MOST_BUSY = 1 / 100
_LATEST_SECONDS = 8.0
#: For so long after a worker was missed they are looked for at every turn: some may be locked, or more than one ends.
_HURRY_SECONDS = 5.0
#: Retention, partitions and old rows: this often.
_HOUSEKEEPING_SECONDS = 60.0
_PROBES_KEPT = timedelta(hours=1)


class Sweeper:
    def __init__(self, settings: Settings, worker: UUID, pool: Pool, store: ObjectStore, announcer: Announcer) -> None:
        self._settings = settings
        self._worker = worker
        self._pool = pool
        self._store = store
        self._announcer = announcer
        self._housekept_at = -_HOUSEKEEPING_SECONDS
        self._last_gate = ("", "")
        self._missed: frozenset[UUID] = frozenset()
        self._hurry_until = 0.0
        self._expire_at = 0.0

    async def run(self) -> None:
        """For ever; a sweep that fails is tried again at the next turn."""
        while True:
            try:
                async with self._pool.acquire() as connection:
                    leads = await workers.lead(connection, "sweeper", self._worker, 3 * self._settings.sweep_seconds)
                    if leads:
                        await self._sweep(connection)
                if leads and monotonic() - self._housekept_at >= _HOUSEKEEPING_SECONDS:
                    await self._keep_house()
                    self._housekept_at = monotonic()
            except TRY_AGAIN as error:
                log.warning("the sweep will be tried again", error=type(error).__name__)
            except StoreError as error:
                log.warning("objects could not be deleted; tried again", error=str(error))
            await asyncio.sleep(min(_WATCH_SECONDS, self._settings.sweep_seconds))

    async def _sweep(self, connection: Connection) -> None:
        gone = await workers.gone(connection) if self._settings.presence else []
        if not self._missed.issuperset(gone):
            self._hurry_until = monotonic() + _HURRY_SECONDS
        self._missed = frozenset(gone)
        if monotonic() < self._hurry_until or monotonic() >= self._expire_at:
            await self._expire_leases(connection, gone)
        jobs_ended(await sweeps.end_cancels(connection, gone))
        jobs_ended(await sweeps.expire_jobs(connection))
        await self._let_in(connection)

    async def _expire_leases(self, connection: Connection, gone: Sequence[UUID]) -> None:
        """At once when a worker is missed, else now and then: it reads all that has run since the last vacuum."""
        began = monotonic()
        ended, hints, failed = await sweeps.expire_leases(connection, gone, self._settings.max_losses)
        jobs_ended(failed)
        if ended:
            log.warning("leases of lost workers ended", leases=ended, workers=[str(owner) for owner in gone])
            metrics.EXPIRED.inc(ended)
            self._announcer.announce(hints)
        now = monotonic()
        self._expire_at = now + pause_after(
            now - began, share=_MOST_BUSY, least=self._settings.sweep_seconds, most=_LATEST_SECONDS
        )

    async def _let_in(self, connection: Connection) -> None:
        """Jobs at gates that nobody asked again, such as those with a rate, some at each sweep."""
        crowded = await gates.crowded(connection, self._last_gate)
        self._last_gate = crowded[-1] if crowded else ("", "")
        self._announcer.announce(await gates.admit(connection, crowded))

    async def _keep_house(self) -> None:
        """No connection is held while the store is asked."""
        async with self._pool.acquire() as connection:
            await sweeps.keep_event_days(connection, ahead=7, behind=self._settings.retention_days + 1)
            await workers.forget_workers(connection, 10 * self._settings.lease_seconds)
            await sweeps.forget_idempotency_keys(connection)
            await gates.forget_gates(connection)
            await rates.forget_rates(connection)
            await downloads.forget_downloads(connection)
        while abandoned := await self._asked(sweeps.abandoned_uploads):
            await self._store.delete(*(key for _, key in abandoned))
            await self._asked(partial(sweeps.forget_uploads, media_ids=[media_id for media_id, _ in abandoned]))
        while expired := await self._asked(generations.expired_sources):
            await self._store.delete(*expired)
            await self._asked(partial(generations.forget_sources, keys=expired))
        await self._store.forget_probes(_PROBES_KEPT)
        while old := await self._asked(sweeps.forgettable_jobs):
            for job in old:
                await self._store.delete(*[found.key async for found in self._store.list(job.prefix + "/")])
            await self._asked(partial(sweeps.forget_jobs, job_ids=[job.job_id for job in old]))

    async def _asked(self, statement: Callable[[Connection], Awaitable[_T]]) -> _T:
        async with self._pool.acquire() as connection:
            return await statement(connection)
