"""What a worker does beside its attempts, again and again: each duty in a loop of its own, so that none waits for what
another waits for, and none ends by what another meets.

Those of the leader are done by one worker at a time. Of the pool's connections the takeover has one at a time, the
others that look every half second share two, and housekeeping shares one (leasehold/db/pool_sizes.py has the sum).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from time import monotonic
from uuid import UUID

from leasehold.broker.announcer import Announcer
from leasehold.db import history
from leasehold.db.database import Connection, Pool
from leasehold.domain.errors import DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline
from leasehold.evaluation.templates import Templates
from leasehold.exporter.jobs import jobs_ended
from leasehold.limits import downloads, external_files, rates
from leasehold.limits.admission import Admission
from leasehold.runtime.duty_cycle import Pauses
from leasehold.runtime.periodic import Periodic
from leasehold.schedules import firing as schedules
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import external, gates, quarantine, sweeps, webhooks, workers
from leasehold.transitions.gates import ConcurrencyLimitName
from leasehold.worker.maintenance.housekeeping import Housekeeping
from leasehold.worker.maintenance.takeover import LATEST_SECONDS, MOST_BUSY, Leadership, Takeover

#: Lost workers, and a lost leader, are looked for this often, so that what they held runs elsewhere within a second.
_WATCH_SECONDS = 0.5
#: Schedules that are due, and runs that webhooks are to be told of, are looked for this often, by every worker.
_EVERY_SECONDS = 0.5
#: Retention, partitions and old rows: this often.
_HOUSEKEEPING_SECONDS = 60.0
#: Connections that they have at once: those of every half second, and those of housekeeping.
_OFTEN, _SELDOM = 2, 1


class Duties:
    """`deliveries`: the pipeline that delivers webhooks, where this installation has it. `kinds`: which have duties of
    their own.
    """

    def __init__(
        self,
        settings: Settings,
        worker: UUID,
        pool: Pool,
        store: ObjectStore,
        announcer: Announcer,
        templates: Templates,
        deliveries: Pipeline | None,
        kinds: Iterable[Kind],
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._announcer = announcer
        self._templates = templates
        self._admission = Admission(settings)
        self._deliveries = deliveries
        self._keep_seconds = settings.retention_days * 86_400
        self._last_gate: ConcurrencyLimitName = ("", "")
        self._leadership = Leadership(worker, 3 * settings.sweep_seconds)
        self._takeover = Takeover(settings, pool, self._leadership, announcer)
        self._late = Pauses(share=MOST_BUSY, least=settings.sweep_seconds, most=LATEST_SECONDS)
        self._often = _shared(pool, _OFTEN)
        self._seldom = _shared(pool, _SELDOM)
        self._housekeeping = Housekeeping(settings, self._seldom, store, kinds)

    def all(self) -> list[Periodic]:
        """The loops, to be run each as a task."""
        watch = min(_WATCH_SECONDS, self._settings.sweep_seconds)
        house = self._housekeeping
        periodic = [
            Periodic("takeover", self._takeover.turn, every=watch),
            self._led("cancels", self._end_cancels, watch),
            self._led("deadlines", self._end_jobs, watch),
            self._led("admissions", self._let_in, watch),
            self._led(external.DUTY, self._end_late_steps, watch),
            Periodic("schedules", self._fire_schedules, every=_EVERY_SECONDS),
            self._led("retention", house.retention),
            self._led("uploads", house.uploads),
            self._led("parts", house.parts),
            self._tidying("external_files", external_files.give_up),
            self._led("probes", house.probes),
            self._tidying("event_days", self._keep_event_days),
            self._tidying("forget_workers", lambda c: workers.forget_workers(c, 10 * self._settings.lease_seconds)),
            self._tidying("forget_idempotency_keys", sweeps.forget_idempotency_keys),
            self._tidying("forget_gates", gates.forget_gates),
            self._tidying("forget_rates", rates.forget_rates),
            self._tidying("forget_downloads", downloads.forget_downloads),
            self._tidying("forget_quarantine", quarantine.forget),
        ]
        if self._deliveries is not None:
            dispatch = partial(self._dispatch_webhooks, self._deliveries)
            periodic.append(Periodic("webhooks", dispatch, every=_EVERY_SECONDS))
        of_kinds = house.of_kinds()
        if taken := {duty.name for duty in periodic} & of_kinds.keys():
            raise DeclarationError(f"a kind of work has duties with names of the platform's own: {sorted(taken)}")
        return periodic + [self._led(name, turn) for name, turn in of_kinds.items()]

    def _led(
        self, name: str, turn: Callable[[], Awaitable[float | None]], every: float = _HOUSEKEEPING_SECONDS
    ) -> Periodic:
        """A duty of the leader. Who leads is known a moment after the start, and may change: whoever does not lead asks
        again soon, which costs nothing.
        """

        async def when_leading() -> float | None:
            return await turn() if self._leadership else min(every, _WATCH_SECONDS)

        return Periodic(name, when_leading, every=every)

    def _tidying(self, name: str, statement: Callable[[Connection], Awaitable[None]]) -> Periodic:
        async def turn() -> None:
            async with self._seldom() as connection:
                await statement(connection)

        return self._led(name, turn)

    async def _end_cancels(self) -> None:
        async with self._often() as connection:
            jobs_ended(await sweeps.end_cancels(connection, self._takeover.gone))

    async def _end_jobs(self) -> None:
        async with self._often() as connection:
            jobs_ended(await sweeps.expire_jobs(connection))

    async def _end_late_steps(self) -> None:
        """Steps of external workers that run past their limit; paced as the takeover, for it reads all that runs."""
        if not self._late.due:
            return
        began = monotonic()
        async with self._often() as connection:
            for ended in await external.end_overdue(connection, self._templates):
                jobs_ended(ended.ended)
                self._announcer.announce(ended.announcements)
        self._late.done(began)

    async def _let_in(self) -> None:
        """Jobs at gates that nobody asked again, such as those with a rate, some at each turn."""
        async with self._often() as connection:
            crowded = await gates.crowded(connection, self._last_gate)
            self._last_gate = crowded[-1] if crowded else ("", "")
            self._announcer.announce(await gates.admit_each(connection, crowded))

    async def _fire_schedules(self) -> None:
        async with self._often() as connection:
            for made in await schedules.fire_due(
                connection,
                self._templates,
                self._keep_seconds,
                pause_after=self._settings.schedule_failures_limit,
                admission=self._admission,
            ):
                jobs_ended(made.ended)
                self._announcer.announce(made.hints)
                self._announcer.announce(await gates.admit(connection, made.gates, made.left))

    async def _dispatch_webhooks(self, deliveries: Pipeline) -> None:
        async with self._often() as connection:
            self._announcer.announce(await webhooks.dispatch(connection, deliveries, self._keep_seconds))

    async def _keep_event_days(self, connection: Connection) -> None:
        await history.keep_event_days(connection, ahead=7, behind=self._settings.retention_days + 1)


def _shared(pool: Pool, most: int) -> Callable[[], AbstractAsyncContextManager[Connection]]:
    turnstile = asyncio.Semaphore(most)

    @asynccontextmanager
    async def acquire() -> AsyncIterator[Connection]:
        async with turnstile, pool.acquire() as connection:
            yield connection

    return acquire
