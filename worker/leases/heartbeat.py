"""The heartbeat renews this worker's leases, in a thread with its own event loop and connection. So the worker loses no
lease while a handler blocks the main loop.

A lease is trusted until `start of the last good renewal + lease_seconds - trust_margin_seconds`. After that another
worker may hold the lease. So the heartbeat stops the attempt, and the attempt writes nothing more. When an attempt runs
long after its time limit (HeldLease.renew_until), the heartbeat stops the attempt and renews the lease no more.
Otherwise a worker whose main loop hangs would keep its tasks for ever.

The heartbeat's session holds the worker's presence, a lock by which other workers see that this worker lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from time import monotonic, perf_counter
from uuid import UUID

import asyncpg
import structlog

from leasehold.db.database import connect, end_timed_out, is_direct
from leasehold.domain.lease import Lease
from leasehold.exporter.jobs import count_ended_jobs
from leasehold.runtime.periodic import record_unforeseen
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.telemetry import database, outages
from leasehold.transitions import claims, workers
from leasehold.worker import metrics
from leasehold.worker.leases.held_lease import HeldLease
from leasehold.worker.leases.orphans import Orphans
from leasehold.worker.leases.registration import Registration
from leasehold.worker.leases.starts import Starts

log = structlog.get_logger(__name__)

#: Seconds for which an answer of the database confirms ownership. The heartbeat sends several queries in this time.
_CONFIRMED_SECONDS = 2.0
#: Seconds between two tries to connect, and between two tries to take the presence lock. PostgreSQL refuses the lock
#: while an earlier session of this worker has it.
_RECONNECT_SECONDS, _APPEAR_SECONDS = 0.1, 0.05
#: Seconds of the pause after an unforeseen error.
_AFTER_ERROR_SECONDS = 1.0


class _RowLostError(Exception):
    """The table `worker` has no row of this worker. The heartbeat reconnects and writes a new row with a new presence
    key.
    """


class Heartbeat:
    """Renews the leases of this worker, and its row, in a thread. Create this in the worker's main loop. In that loop
    the heartbeat calls `on_failure` when an error has ended the heartbeat's thread. It calls `on_drain` when an
    operator asks this worker to drain (to end once its attempts have ended). Each renewal of the worker's row also
    writes how many attempts have started (`starts`). `registration`: the contents of this row.
    """

    def __init__(
        self,
        settings: Settings,
        registration: Registration,
        starts: Starts,
        on_failure: Callable[[Exception], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._registration = registration
        self._starts = starts
        self._worker = registration.worker
        self._orphans = Orphans(registration.worker, settings.lease_seconds)
        self._on_failure = on_failure
        self._on_drain = on_drain
        self._main_loop = asyncio.get_running_loop()
        # By task. A lost lease stays here until `drop`, or until a newer claim of the task.
        self._held: dict[UUID, HeldLease] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()  # set when the session has ended, and by `close`
        # The thread runs in this context, so that its log lines name the worker, too.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._thread_main,), name="heartbeat", daemon=True
        )
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        # When the last renewal began.
        self._renewed_at = monotonic()
        self._connected = threading.Event()  # set once this worker is present for the first time, or presence is off
        self._answered_at = float("-inf")  # when the heartbeat sent the last query that the database answered
        self._answer_lost = False  # set by `record_lost_answer`; the next round begins to search for orphans
        self._presence_key: int | None = None  # of the presence lock; None: presence is off
        self._is_present = False  # this session holds the lock, or presence is off
        self._unconfirmed = True  # False once this worker is present and a renewal has confirmed its leases

    def start(self) -> None:
        metrics.LEASES.set_function(lambda: len(self._held))
        self._thread.start()

    async def wait_for_presence(self, within: float) -> None:
        """Wait until this worker is present for the first time (or presence is off), at most `within` seconds. Without
        presence, no other worker would see the death of this worker, and its tasks would wait until their leases pass.
        If the database is away, this method returns after `within` seconds, and the heartbeat goes on trying.
        """
        await asyncio.to_thread(self._connected.wait, within)

    def close(self) -> None:
        self._closing = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended, and has closed its loop
                self._loop.call_soon_threadsafe(self._woken.set)
        self._thread.join(timeout=5)

    def hold(self, lease: Lease, seconds: float) -> HeldLease:
        """Renew `lease` from now on, for at most `seconds`.

        In three cases the returned lease is already lost, and no attempt may run under it:
        - The answer to the claim came too late.
        - This worker has a newer claim of the same task.
        - This worker holds the task with the same epoch, because a failover has lost the commit of the earlier claim.
          The older HeldLease stays valid, because its attempt still runs, and the new claim has the same owner and
          epoch. A second attempt with the same owner and epoch could overwrite what the first attempt settles.
        """
        confirmed = partial(self.ownership_confirmed, lease.task_id)
        held = HeldLease(lease, monotonic() + seconds, confirmed=confirmed)
        with self._lock:
            older = self._held.get(lease.task_id)
            # With the same epoch, the new lease counts only if the older one is lost (else it is the third case above).
            is_newest = (
                older is None or older.lease.epoch < lease.epoch or (older.lease.epoch == lease.epoch and older.lost)
            )
            held.lost = not is_newest or not held.trusted()
            if is_newest:
                self._held[lease.task_id] = held
        if held.lost:
            metrics.LOST.inc()
            log.warning("lease lost")
        if is_newest and older is not None and not older.lost:  # a newer claim proves that the older lease ended
            older.lost = True
            older.notify_stop()
        return held

    def drop(self, held: HeldLease) -> None:
        """Call this when the attempt has ended. The lease is renewed no more, and a handler that still runs can write
        nothing.
        """
        with self._lock:
            held.lost = True
            if self._held.get(held.lease.task_id) is held:
                del self._held[held.lease.task_id]

    def holds(self, task_id: UUID) -> bool:
        """Whether this worker holds the task's lease, as far as the worker knows. False if the lease is lost, because
        the worker may then claim the task again.
        """
        with self._lock:
            held = self._held.get(task_id)
            return held is not None and not held.lost

    def all_held(self) -> list[UUID]:
        """The tasks whose leases this worker holds, as far as it knows, and the tasks whose leases are lost, but not
        dropped yet.
        """
        with self._lock:
            return list(self._held)

    def ownership_confirmed(self, task_id: UUID) -> bool:
        """Whether the answer of `holds` is reliable. In three cases it is not:
        - The database is away. This worker then has no presence, and other workers may take its tasks before this
          worker notices that.
        - The task is being settled. PostgreSQL may have committed the settlement, and the task may be due again.
        - The lease has just expired, and the heartbeat has not marked it as lost yet.
        """
        with self._lock:
            held = self._held.get(task_id)
            is_doubtful = held is not None and not held.lost and (held.settlement_sent or not held.trusted())
        return not is_doubtful and not self._unconfirmed and monotonic() - self._answered_at < _CONFIRMED_SECONDS

    def record_lost_answer(self) -> None:
        """Call this when the answer to a statement that claims tasks is lost, and no repetition of the statement claims
        all of these tasks again. The heartbeat then releases the orphans: tasks that this worker owns by PostgreSQL's
        rows, but does not hold (orphans.py).
        """
        self._answer_lost = True

    # --- the heartbeat's own thread runs everything below

    def _thread_main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 - after any error, this worker cannot renew its leases
            self._main_loop.call_soon_threadsafe(self._on_failure, error)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        # The pause between two rounds, in seconds.
        tick = min(0.5, self._settings.renew_seconds / 4)
        watching_trust = asyncio.create_task(self._watch_trust(tick))
        try:
            while not self._closing:
                await self._beat()
                if watching_trust.done():
                    watching_trust.result()  # raises the error that has ended `_watch_trust`
                if self._connection is None:
                    await self._pause(_RECONNECT_SECONDS)
                else:
                    await self._pause(tick if self._is_present else _APPEAR_SECONDS)
        finally:
            watching_trust.cancel()
            self._disconnect()

    async def _beat(self) -> None:
        # One round: connect and take the presence lock if needed, renew the leases if that is due, read which jobs are
        # being cancelled, release orphans. Any error cuts the connection, and the next round connects again.
        try:
            if self._connection is None:
                await self._connect()
            if not self._is_present:
                await self._try_to_appear()
            is_due = monotonic() - self._renewed_at >= self._settings.renew_seconds
            if is_due or (self._unconfirmed and self._is_present):
                await self._renew()
            requested_at = monotonic()
            await self._read_cancels()
            await self._release_orphans()
            # Record when the query was sent, not when its answer was read. If the process was stopped in between, the
            # answer was old when it was read.
            self._answered_at = requested_at
            outages.DATABASE.record_answer()
        except _RowLostError:
            log.warning("the registry has no row of this worker any more; the worker registers again")
            self._disconnect()
        except TRY_AGAIN as error:
            outages.DATABASE.record_error(error, "heartbeat")
            if isinstance(error, TimeoutError) and self._connection is not None:
                await end_timed_out(self._connection)
            self._disconnect()
        except Exception as error:  # noqa: BLE001 - after any error, `_watch_trust` marks leases as lost in time
            record_unforeseen("heartbeat", error)
            self._disconnect()
            await asyncio.sleep(_AFTER_ERROR_SECONDS)

    async def _watch_trust(self, tick: float) -> None:
        """Mark leases as lost when they are no longer trusted. This method runs in an asyncio task of its own, because
        a renewal may wait for an answer for longer than a lease is trusted.
        """
        while True:
            self._lose_untrusted()
            await asyncio.sleep(tick)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for loses a cancellation before Python 3.12
                await self._woken.wait()
        self._woken.clear()
        if self._connection is not None and self._connection.is_closed():
            self._disconnect()  # the server ended the session, and with it this worker's presence

    async def _connect(self) -> None:
        connection = await connect(self._settings.direct(), "heartbeat")
        connection.add_termination_listener(lambda _connection: self._woken.set())
        self._connection = connection
        self._presence_key = await self._registration.write(connection)
        # After a restart or a failover of the server, this extends the leases, because other workers must not take the
        # tasks before `_renew` has confirmed the leases.
        await workers.keep_leases(connection, self._worker, self._settings.lease_seconds)
        # The search must begin after `keep_leases`, because it finds only leases that were not renewed since its
        # beginning.
        await self._orphans.begin_search(connection)
        database.CONNECTS.inc()
        database.UP.set(1)
        if not self._settings.presence:
            self._presence_key = None
        elif not await is_direct(connection):
            log.warning(
                "the connection goes through a pooler: presence is off, so a dead worker's tasks wait until their"
                " leases expire"
            )
            self._presence_key = None

    async def _try_to_appear(self) -> None:
        """Take the presence lock. PostgreSQL refuses the lock until this worker's earlier session has ended, and sends
        no message when that session ends. So the heartbeat tries again every `_APPEAR_SECONDS`. (A server that lost the
        network notices the end of a session only after 20 s.) Meanwhile the heartbeat renews the leases, but does not
        count them as confirmed.
        """
        assert self._connection is not None
        if self._presence_key is None or await workers.appear(self._connection, self._worker, self._presence_key):
            self._is_present = True
            self._connected.set()

    def _disconnect(self) -> None:
        self._unconfirmed = True  # without presence, others may take the tasks; so the next session first renews
        self._is_present = False
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
            database.UP.set(0)

    async def _renew(self) -> None:
        # Renew the worker's row, and the leases of all attempts that are not overdue. Mark the overdue attempts.
        assert self._connection is not None
        started = monotonic()
        with self._lock:
            valid = [held for held in self._held.values() if not held.lost]
        renewable = [held for held in valid if held.renew_until > started]
        for held in valid:
            if held.renew_until <= started and not held.overdue:
                self._mark_overdue(held)
        draining = await workers.record_alive(self._connection, self._worker, self._starts.per_minute())
        if draining is None:
            # A failover has lost the row, or the sweeper deleted it because this worker was away for too long.
            raise _RowLostError
        if draining:
            self._main_loop.call_soon_threadsafe(self._on_drain)
        if renewable:
            leases = [held.lease for held in renewable]
            began = perf_counter()
            answers = await claims.renew(self._connection, self._worker, leases, self._settings.lease_seconds)
            metrics.observe_duration("renew", began)
            by_task = {answer.task_id: answer for answer in answers}
            for held in renewable:
                self._apply_renewal(held, by_task[held.lease.task_id], started)
            # The renewal skips a row that another statement has locked. The other statement may be a takeover. So
            # ownership is confirmed only if no row was skipped.
            is_confirmed = all(answer.renewed or not answer.is_valid for answer in answers)
        else:
            is_confirmed = True
        if is_confirmed and self._is_present:
            self._unconfirmed = False
        self._renewed_at = started

    def _apply_renewal(self, held: HeldLease, answer: claims.Renewal, started: float) -> None:
        # If the lease was not renewed only because another statement has locked its row, it stays trusted as long as
        # before.
        if answer.renewed:
            held.trusted_until = started + self._settings.lease_seconds - self._settings.trust_margin_seconds
        elif not answer.is_valid:
            self._mark_lost(held)
        if answer.must_stop:
            self._mark_cancelled(held)

    async def _read_cancels(self) -> None:
        """Read which jobs are being cancelled. This method runs in every round, which is more often than the renewals.
        So a step learns of a client's cancel within a second.
        """
        assert self._connection is not None
        with self._lock:
            by_task = dict(self._held)
        if by_task:
            for task_id in await claims.to_cancel(self._connection, self._worker, by_task):
                self._mark_cancelled(by_task[task_id])

    async def _release_orphans(self) -> None:
        """Release the tasks that this worker owns by PostgreSQL's rows, but does not hold (orphans.py)."""
        assert self._connection is not None
        if self._answer_lost:
            self._answer_lost = False
            await self._orphans.begin_search(self._connection)
        if self._orphans.is_searching:
            with self._lock:
                task_ids = list(self._held)
            if jobs := await self._orphans.release(self._connection, task_ids):
                self._main_loop.call_soon_threadsafe(count_ended_jobs, jobs)

    def _mark_cancelled(self, held: HeldLease) -> None:
        if not held.cancelled:
            held.cancelled = True
            self._main_loop.call_soon_threadsafe(held.notify_cancelled)

    def _lose_untrusted(self) -> None:
        now = monotonic()
        with self._lock:
            overdue = [held for held in self._held.values() if not held.lost and held.trusted_until <= now]
        for held in overdue:
            self._mark_lost(held)

    def _mark_lost(self, held: HeldLease) -> None:
        with self._lock:
            if self._held.get(held.lease.task_id) is not held:
                return  # dropped meanwhile: the attempt has ended
            held.lost = True
        metrics.LOST.inc()
        held.context.copy().run(log.warning, "lease lost")
        self._main_loop.call_soon_threadsafe(held.notify_stop)

    def _mark_overdue(self, held: HeldLease) -> None:
        """The attempt runs long after its time limit, for example because the handler caught the CancelledError. Stop
        the attempt while its lease is still valid. So the attempt fails because of its time limit, not because of a
        lost lease.
        """
        held.overdue = True
        self._main_loop.call_soon_threadsafe(held.notify_stop)
