"""The duties of a worker: the maintenance that it repeats besides its attempts.

Each duty runs in a loop of its own (Periodic), so an error of one duty ends no other duty. Most duties run only in the
leader. (Of all workers, one at a time is elected to lead.) The takeover of dead workers' tasks takes a
connection from the worker's pool (leasehold/db/pool_sizes.py) without waiting for other duties. The other frequent
duties share two connections of the pool, and all housekeeping duties share one connection. A duty that shares
connections waits until one of them is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from time import monotonic

import structlog

from leasehold.broker.announcer import Announcer
from leasehold.broker.base import Hint
from leasehold.db import audit, history, statistics
from leasehold.db.database import Connection, Pool
from leasehold.db.servers import check_takes_writes
from leasehold.domain.errors import BadSetting, DeclarationError
from leasehold.domain.kind import Kind
from leasehold.domain.pipeline import Pipeline
from leasehold.evaluation.templates import Templates
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.kinds.job_kinds import reported_jobs_of
from leasehold.limits import downloads, external_files, people, rates
from leasehold.limits.admission import Admission
from leasehold.runtime.duty_cycle import Pauses
from leasehold.runtime.periodic import Periodic
from leasehold.schedules import declared
from leasehold.schedules import firing as schedules
from leasehold.security.cells import Cells
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import concurrency, external, jobs, quarantine, sweeps, unknown_tasks, webhooks, workers
from leasehold.transitions.concurrency import ConcurrencyLimitName
from leasehold.transitions.workflows import children
from leasehold.worker.leases.registration import Registration
from leasehold.worker.maintenance.housekeeping import Housekeeping
from leasehold.worker.maintenance.takeover import LATEST_SECONDS, MAX_BUSY, Leadership, Takeover

log = structlog.get_logger(__name__)

#: Seconds between two searches for dead workers and for a dead leader. With this pause, another worker takes over the
#: tasks of a dead worker, and the duties of a dead leader, within a second.
_WATCH_SECONDS = 0.5
#: Seconds between two searches for due schedules, and between two searches for webhooks to send.
_EVERY_SECONDS = 0.5
#: Seconds between two searches for tables that have grown quickly. A search takes PostgreSQL half a millisecond.
_GROWN_SECONDS = 2.0
#: Seconds between two searches for tasks that were put off because the worker that claimed them lacked their code. A
#: search wakes the tasks whose code this worker has.
_KNOWN_SECONDS = 30.0
#: Seconds between two searches for apps whose schedules in code this worker must write again.
_DECLARED_SECONDS = 30.0
#: One search of `_wake_known` wakes at most this many tasks. If more tasks may wait, the next search follows after this
#: many seconds.
_MAX_KNOWN, _NEXT_KNOWN_SECONDS = 500, 0.5
#: In one turn, a duty ends at most this many jobs, or reports the ends of at most this many. After a turn with this
#: many jobs, the next turn follows immediately, because any number of jobs may have passed their deadline at once.
_JOBS_AT_ONCE = 100
#: The duty `_follow_children` takes at most this part of the time. Exception: it runs at least once in LATEST_SECONDS.
#: The part is larger than MAX_BUSY, the part for other such duties, because workflows wait for this duty.
_MAX_BUSY_WITH_RUNS = 1 / 10
#: Seconds between two turns of retention, partitions and the deletion of old rows.
_HOUSEKEEPING_SECONDS = 60.0
#: How many connections the frequent duties share, and how many connections the housekeeping duties share.
_FREQUENT_CONNECTIONS, _HOUSEKEEPING_CONNECTIONS = 2, 1
#: A name that sorts before the names of all concurrency limits.
_BEFORE_ALL: ConcurrencyLimitName = ("", "")


class Duties:
    """All duties of one worker. A method that is the turn of a duty returns the seconds until the next turn; None: the
    usual pause of the duty. `deliveries`: the pipeline that delivers webhooks, if this installation has one. `kinds`:
    the kinds of work (such as pictures), which may add duties of their own. `deliver_here`: HintRouter.deliver_here,
    which gives hints (messages about due tasks) directly to this worker's own slots, without the broker.
    """

    def __init__(
        self,
        settings: Settings,
        registration: Registration,
        pool: Pool,
        store: ObjectStore,
        announcer: Announcer,
        templates: Templates,
        deliveries: Pipeline | None,
        kinds: Sequence[Kind],
        deliver_here: Callable[[Sequence[Hint]], None],
    ) -> None:
        self._settings = settings
        self._deliver_here = deliver_here
        self._pool = pool
        self._announcer = announcer
        self._templates = templates
        self._admission = Admission(settings, kinds)
        self._deliveries = deliveries
        self._reported_jobs = reported_jobs_of(kinds)
        self._keep_seconds = settings.retention_days * 86_400
        self._last_limit = _BEFORE_ALL  # the last limit that the latest turn of `_admit` served
        self._registration = registration
        self._leadership = Leadership(registration.worker, 3 * settings.sweep_seconds)  # true while this worker leads
        self._takeover = Takeover(settings, pool, self._leadership, announcer)
        self._unwritten_schedules = dict(templates.pipelines.schedules)  # by app; `_fire_schedules` writes them
        # When this worker last searched for apps whose schedules no worker writes any more.
        self._declared_at = monotonic()
        self._cells = _cells_of(settings)
        self._is_elsewhere = False  # the tenant of the declared schedules lives in another cell
        # Says when `admit_each` may make its slow search again.
        self._admission_search = concurrency.new_search()
        # Pauses that grow with the time that a duty's queries take.
        self._late_step_pauses = Pauses(share=MAX_BUSY, at_least=settings.sweep_seconds, at_most=LATEST_SECONDS)
        self._started_run_pauses = Pauses(share=_MAX_BUSY_WITH_RUNS, at_least=0.0, at_most=LATEST_SECONDS)
        self._frequent_connection = _shared(pool, _FREQUENT_CONNECTIONS)
        self._housekeeping = Housekeeping(settings, _shared(pool, _HOUSEKEEPING_CONNECTIONS), store, kinds)

    def all(self) -> list[Periodic]:
        """The loops of all duties. The worker runs each loop as an asyncio task."""
        watch = min(_WATCH_SECONDS, self._settings.sweep_seconds)
        housekeeping = self._housekeeping
        periodic = [
            Periodic("takeover", self._takeover.turn, every=watch),
            self._leader_duty("cancels", self._end_cancels, watch),
            self._leader_duty("deadlines", self._end_jobs, watch),
            self._leader_duty("admissions", self._admit, watch),
            self._leader_duty(external.DUTY, self._end_late_steps, watch),
            self._leader_duty(children.DUTY, self._follow_children, watch),
            Periodic("schedules", self._fire_schedules, every=_EVERY_SECONDS),
            Periodic("unknown_tasks", self._wake_known, every=_KNOWN_SECONDS),
            self._leader_duty("statistics", self._analyze_grown_tables, _GROWN_SECONDS),
            self._leader_duty("retention", housekeeping.retention),
            self._leader_duty("uploads", housekeeping.uploads),
            self._leader_duty("parts", housekeeping.parts),
            self._tidying_duty("external_files", external_files.give_up),
            self._leader_duty("probes", housekeeping.probes),
            self._tidying_duty("event_days", self._keep_event_days),
            self._tidying_duty(
                "forget_workers",
                lambda connection: workers.forget_workers(connection, 10 * self._settings.lease_seconds),
            ),
            self._tidying_duty("forget_handlers", workers.forget_handlers),
            self._tidying_duty("forget_idempotency_keys", sweeps.forget_idempotency_keys),
            self._tidying_duty(
                "forget_tombstones",
                lambda connection: jobs.forget_tombstones(connection, self._settings.tombstone_hours),
            ),
            self._tidying_duty("forget_audit", lambda connection: audit.forget(connection, self._settings.audit_days)),
            self._tidying_duty(
                "forget_people", lambda connection: people.forget(connection, self._settings.people_days)
            ),
            self._tidying_duty("forget_gates", concurrency.forget_unused_limits),
            self._tidying_duty("forget_rates", rates.forget_rates),
            self._tidying_duty("forget_downloads", downloads.forget_downloads),
            self._tidying_duty("forget_quarantine", quarantine.forget),
        ]
        if self._deliveries is not None:
            dispatch = partial(self._dispatch_webhooks, self._deliveries)
            periodic.append(Periodic("webhooks", dispatch, every=_EVERY_SECONDS))
        turns_of_kinds = housekeeping.turns_of_kinds()
        if duplicates := {duty.name for duty in periodic} & turns_of_kinds.keys():
            raise DeclarationError(
                f"a kind of work and the platform have duties of the same name: {sorted(duplicates)}"
            )
        return periodic + [self._leader_duty(name, turn) for name, turn in turns_of_kinds.items()]

    def _leader_duty(
        self, name: str, turn: Callable[[], Awaitable[float | None]], every: float = _HOUSEKEEPING_SECONDS
    ) -> Periodic:
        """A duty that only the leader carries out. Any other worker checks again after at most `_WATCH_SECONDS`
        whether it leads now. The check sends no query.
        """

        async def when_leading() -> float | None:
            return await turn() if self._leadership else min(every, _WATCH_SECONDS)

        return Periodic(name, when_leading, every=every)

    def _tidying_duty(self, name: str, statement: Callable[[Connection], Awaitable[bool | None]]) -> Periodic:
        """A duty of the leader that calls `statement` once a minute, with a housekeeping connection. If
        `statement` returns True, more rows may be due, and the duty calls `statement` again soon.
        """
        return self._leader_duty(name, partial(self._housekeeping.tidy, statement))

    async def _end_cancels(self) -> float | None:
        """End the jobs whose cancel clients have requested, once the grace has passed or the jobs' workers are lost."""
        async with self._frequent_connection() as connection:
            # `dead`: the workers that the takeover has found dead.
            ended_jobs = await sweeps.end_cancels(
                connection, self._takeover.dead, self._settings.max_losses, _JOBS_AT_ONCE
            )
        count_ended_jobs(ended_jobs)
        return 0.0 if len(ended_jobs) == _JOBS_AT_ONCE else None

    async def _end_jobs(self) -> float | None:
        """End the jobs whose deadline has passed."""
        async with self._frequent_connection() as connection:
            ended_jobs = await sweeps.expire_jobs(
                connection, _JOBS_AT_ONCE, hooks=self._housekeeping.hooks_after_expiry
            )
        count_ended_jobs(ended_jobs)
        return 0.0 if len(ended_jobs) == _JOBS_AT_ONCE else None

    async def _follow_children(self) -> float | None:
        """Wake the workflows whose awaited runs have ended, and cancel the runs of workflows that did not succeed. The
        statements read all open calls of workflows. So the slower the statements are, the longer this duty pauses.
        Returns 0 (the next turn follows immediately) if there is more to do.
        """
        if not self._started_run_pauses.due:
            return None
        async with self._frequent_connection() as connection:
            began = monotonic()
            wakes = await children.wake_waiting(connection, _JOBS_AT_ONCE)
            self._announcer.announce(wakes)
            ended, hints, has_more = await children.cancel_orphans(connection, _JOBS_AT_ONCE)
            count_ended_jobs(ended)
            self._announcer.announce(hints)
            has_more |= await children.close_calls(connection)
        self._started_run_pauses.done(began)
        if has_more or len(wakes) == _JOBS_AT_ONCE:
            self._started_run_pauses.forget()
            return 0.0
        return None

    async def _end_late_steps(self) -> None:
        """End steps of external workers that run longer than their time limit. The query reads all running tasks. So
        the slower the query is, the longer this duty pauses, as the takeover does.
        """
        if not self._late_step_pauses.due:
            return
        began = monotonic()
        async with self._frequent_connection() as connection:
            for outcome in await external.end_overdue(connection, self._templates):
                count_ended_jobs(outcome.ended)
                self._announcer.announce(outcome.announcements)
        self._late_step_pauses.done(began)

    async def _wake_known(self) -> float | None:
        """Wake the tasks that a worker without their code has put off, if this worker has their code."""
        registration = self._registration
        async with self._frequent_connection() as connection:
            hints, has_more = await unknown_tasks.wake_known(
                connection, registration.worker, registration.queues, registration.handlers, _MAX_KNOWN
            )
        self._deliver_here(hints)  # so that no worker without the code polls these tasks first
        return _NEXT_KNOWN_SECONDS if has_more else None

    async def _admit(self) -> None:
        """Admit jobs at all concurrency limits at which jobs wait. If the end of a job has made room, the admitter
        (admitter.py) is faster than this duty. The duty is for all other cases. For example, a rate has room again, or
        the admitter's worker has died.

        Each turn serves some of the limits, in the order of their names. After the last limit, the next turn begins
        again with the first one.
        """
        async with self._frequent_connection() as connection:
            limits = await concurrency.with_waiting_jobs(connection, self._last_limit)
            if not limits and self._last_limit != _BEFORE_ALL:
                limits = await concurrency.with_waiting_jobs(connection, _BEFORE_ALL)
            self._last_limit = limits[-1] if limits else _BEFORE_ALL
            self._announcer.announce(await concurrency.admit_each(connection, limits, self._admission_search))

    async def _fire_schedules(self) -> float | None:
        """Write the schedules that apps declare in code, if this worker has not written them yet, or must write them
        again. Then fire the due schedules. Returns 0 (the next turn follows immediately) if more schedules may be due.
        """
        async with self._frequent_connection() as connection:
            await self._write_declared_schedules(connection)
            created_runs, has_more = await schedules.fire_due(
                connection,
                self._templates,
                self._keep_seconds,
                pause_after=self._settings.schedule_failures_limit,
                admission=self._admission,
            )
            for fired in created_runs:  # announce first, because an admission may fail, or wait for a locked limit
                count_ended_jobs(fired.ended)
                self._announcer.announce(fired.hints)
            for fired in created_runs:  # `departed`: runs that have been replaced
                self._announcer.announce(await concurrency.admit(connection, fired.limits, fired.departed))
        return 0.0 if has_more else None

    async def _write_declared_schedules(self, connection: Connection) -> None:
        """Write the declared schedules of this worker's tenant: first those that this worker has not written yet. Then,
        every _DECLARED_SECONDS, write again those of apps that no worker writes any more. Exception: if the map of
        cells places the tenant in another cell, the schedules fire in that cell, and this method writes no schedule.
        """
        if self._lives_elsewhere():
            return
        tenant_id, worker = self._settings.tenant, self._registration.worker
        if self._unwritten_schedules:
            for app in await declared.reconcile_apps(connection, tenant_id, self._unwritten_schedules, worker):
                del self._unwritten_schedules[app]
        if monotonic() - self._declared_at >= _DECLARED_SECONDS and not self._registration.draining:
            all_schedules = self._templates.pipelines.schedules
            written = sorted(all_schedules.keys() - self._unwritten_schedules.keys())
            # If an app cannot be taken over now, the next search finds it again.
            if apps := await declared.apps_to_take_over(connection, tenant_id, written, worker):
                to_write = {app: all_schedules[app] for app in apps}
                await declared.reconcile_apps(connection, tenant_id, to_write, worker, only_without_writer=True)
            self._declared_at = monotonic()

    def _lives_elsewhere(self) -> bool:
        """Whether the map of cells places this worker's tenant in another cell. If the worker's code declares
        schedules, this logs a warning when the answer becomes True.
        """
        if self._cells is None:
            return False
        cell = self._cells.map.tenants.get(self._settings.tenant, self._cells.own)
        was_elsewhere, self._is_elsewhere = self._is_elsewhere, cell != self._cells.own
        if self._is_elsewhere and not was_elsewhere and self._templates.pipelines.schedules:
            log.warning(
                "the schedules that the code declares are not written: their tenant lives in another cell, so this "
                "worker should have the settings of that cell",
                tenant=self._settings.tenant,
                cell=cell,
            )
        return self._is_elsewhere

    async def _dispatch_webhooks(self, deliveries: Pipeline) -> float | None:
        """Write the deliveries (jobs of the pipeline `deliveries`) about jobs that have ended, and the `on_failure`
        runs of failed jobs.
        """
        async with self._frequent_connection() as connection:
            hints, has_more = await webhooks.dispatch(
                connection,
                deliveries,
                self._keep_seconds,
                self._reported_jobs,
                limit=_JOBS_AT_ONCE,
                pipelines=list(self._templates.pipelines),
            )
        self._announcer.announce(hints)
        return 0.0 if has_more else None

    async def _analyze_grown_tables(self) -> None:
        async with self._frequent_connection() as connection:
            await statistics.analyze_grown_tables(connection)

    async def _keep_event_days(self, connection: Connection) -> bool:
        return await history.keep_event_days(connection, days_ahead=7, days_kept=self._settings.retention_days + 1)


def _cells_of(settings: Settings) -> Cells | None:
    """The map of cells. None: there are no cells, or the map cannot be read. In both cases the worker writes its
    schedules. If it wrote none, the schedules of a tenant that lives here would stop.
    """
    if settings.cells_file is None:
        return None
    try:
        return Cells.of(settings)
    except BadSetting as error:
        log.warning("the worker has no map of cells", error=str(error))
        return None


def _shared(pool: Pool, at_most: int) -> Callable[[], AbstractAsyncContextManager[Connection]]:
    """Returns a function that lends connections of the pool: at most `at_most` at once to all its callers.

    If the connection leads to a standby, that function raises one of TRY_AGAIN (errors after which a duty tries again).
    The reason: a standby may lack the newest rows. By older rows, housekeeping would for example delete the objects of
    a job that has been retried meanwhile.
    """
    permits = asyncio.Semaphore(at_most)

    @asynccontextmanager
    async def acquire() -> AsyncIterator[Connection]:
        async with permits, pool.acquire() as connection:
            check_takes_writes(connection)
            yield connection

    return acquire
