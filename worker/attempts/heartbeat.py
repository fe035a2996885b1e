"""Keeping leases: a thread with its own loop and connection, so that busy handlers cannot lose them.

A lease is trusted until `monotonic(start of the last good renewal) + ttl - margin`. Past that another worker may
have it: the attempt is stopped, and nothing of it is written. A lease whose attempt outlives its time limit is no
longer renewed, so that a worker whose main loop hangs for ever does not keep its tasks for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from uuid import UUID

import asyncpg
import structlog

from leasehold.db.database import Connection, connect, is_direct
from leasehold.domain.lease import Lease
from leasehold.runtime.periodic import unforeseen
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.telemetry import database, outages
from leasehold.transitions import claims, workers
from leasehold.worker import metrics

log = structlog.get_logger(__name__)

#: The database is asked several times as often while leases are held.
_SURE_SECONDS = 2.0
#: The pause after an error that nobody foresaw.
_AFTER_ERROR_SECONDS = 1.0


@dataclass(slots=True)
class Held:
    """A lease that this worker holds now."""

    lease: Lease
    renew_until: float
    trusted_until: float = field(init=False)
    #: Of the attempt: what is logged about its lease names the job.
    context: Context = field(default_factory=copy_context, init=False)
    lost: bool = field(default=False, init=False)
    #: Its settlement is on its way: the database may have carried it out, and the task be anybody's again.
    settling: bool = field(default=False, init=False)
    cancelled: bool = field(default=False, init=False)
    _stop: Callable[[], object] | None = field(default=None, init=False)
    _ask: Callable[[], object] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.trusted_until = self.lease.trusted_until

    def on_stop(self, stop: Callable[[], object], ask: Callable[[], object]) -> None:
        """In the main loop: call `stop` when the lease is lost, `ask` when the job was asked to stop."""
        self._stop, self._ask = stop, ask
        if self.lost:
            stop()
        elif self.cancelled:
            ask()

    def stop(self) -> None:
        if self._stop is not None:
            self._stop()

    def ask(self) -> None:
        if self._ask is not None:
            self._ask()

    def trusted(self) -> bool:
        return not self.lost and monotonic() < self.trusted_until


class Heartbeat:
    """Made in the main loop. Called there: `on_failure` when the heartbeat itself ends by an error, `on_drain` when
    an operator asks this worker to stop.
    """

    def __init__(
        self,
        settings: Settings,
        worker: UUID,
        presence_key: int,
        on_failure: Callable[[Exception], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._worker = worker
        self._presence_key = presence_key
        self._on_failure = on_failure
        self._on_drain = on_drain
        self._main_loop = asyncio.get_running_loop()
        self._held: dict[UUID, Held] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = asyncio.Event()
        # In our context, so that what the thread logs names the worker, too.
        self._thread = threading.Thread(
            target=copy_context().run, args=(self._thread_main,), name="heartbeat", daemon=True
        )
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._renewed_at = monotonic()
        self._met = threading.Event()
        self._answered_at = float("-inf")  # of the last question that the database has answered
        self._doubtful = True  # our presence was interrupted, and what we hold was not confirmed since

    def start(self) -> None:
        metrics.LEASES.set_function(lambda: len(self._held))
        self._thread.start()

    async def met(self, within: float) -> None:
        """Wait for the first contact: what is claimed before is freed by its lease alone, should we die. No longer
        than `within` seconds: a database that is away is waited for elsewhere.
        """
        await asyncio.to_thread(self._met.wait, within)

    def close(self) -> None:
        self._closing = True
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self._woken.set)
        self._thread.join(timeout=5)

    def hold(self, lease: Lease, seconds: float) -> Held:
        """Renew `lease` from now on, for at most `seconds`. A claim that was heard of only when it could not be trusted
        any more, or after a later one of the same task, is lost from the beginning.
        """
        held = Held(lease, monotonic() + seconds)
        with self._lock:
            before = self._held.get(lease.task_id)
            is_newest = before is None or before.lease.epoch <= lease.epoch
            held.lost = not is_newest or not held.trusted()
            if is_newest:
                self._held[lease.task_id] = held
        if held.lost:
            metrics.LOST.inc()
            log.warning("lease lost")
        if is_newest and before is not None and not before.lost:  # the new claim tells that the older one is not ours
            before.lost = True
            before.stop()
        return held

    def drop(self, held: Held) -> None:
        with self._lock:
            if self._held.get(held.lease.task_id) is held:
                del self._held[held.lease.task_id]

    def holds(self, task_id: UUID) -> bool:
        """Whether its lease is ours, as far as we know: the hint of a task whose lease we lost is for us, too."""
        with self._lock:
            held = self._held.get(task_id)
            return held is not None and not held.lost

    def all_held(self) -> list[UUID]:
        """The tasks whose leases are ours, as far as we know."""
        with self._lock:
            return list(self._held)

    def sure(self, task_id: UUID) -> bool:
        """Whether what `holds` says of it can be relied on. While the database is away our presence has ended, and as
        soon as it is back others may take what we hold before we hear of it; and what we are settling may be due again.
        """
        with self._lock:
            held = self._held.get(task_id)
            doubted = held is not None and not held.lost and (held.settling or not held.trusted())
        return not doubted and not self._doubtful and monotonic() - self._answered_at < _SURE_SECONDS

    # --- below: the heartbeat's own thread

    def _thread_main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001 - whatever it is, this worker cannot keep its leases any more
            self._main_loop.call_soon_threadsafe(self._on_failure, error)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        tick = min(0.5, self._settings.renew_seconds / 4)
        distrusting = asyncio.create_task(self._keep_distrusting(tick))
        try:
            while not self._closing:
                await self._beat()
                if distrusting.done():
                    distrusting.result()
                await self._pause(tick if self._connection is not None else 0.1)
        finally:
            distrusting.cancel()
            self._disconnect()

    async def _beat(self) -> None:
        try:
            if self._connection is None:
                await self._connect()
            if self._doubtful or monotonic() - self._renewed_at >= self._settings.renew_seconds:
                await self._renew()
            asked_at = monotonic()
            await self._hear_of_cancels()
            self._answered_at = asked_at  # a process that stood still meanwhile reads an answer of long ago
            outages.DATABASE.answered()
        except TRY_AGAIN as error:
            outages.DATABASE.met(error, "heartbeat")
            self._disconnect()
        except Exception as error:  # noqa: BLE001 - whatever it is: leases that it keeps from renewal are lost in time
            unforeseen("heartbeat", error)
            self._disconnect()
            await asyncio.sleep(_AFTER_ERROR_SECONDS)

    async def _keep_distrusting(self, tick: float) -> None:
        """Beside the renewals: one that gets no answer hangs for longer than a lease may be trusted."""
        while True:
            self._distrust()
            await asyncio.sleep(tick)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # wait_for loses a cancellation before Python 3.12
                await self._woken.wait()
        self._woken.clear()
        if self._connection is not None and self._connection.is_closed():
            self._disconnect()  # ended by the other side: presence is gone until we are back

    async def _connect(self) -> None:
        connection = await connect(self._settings, "heartbeat")
        connection.add_termination_listener(lambda _connection: self._woken.set())
        self._connection = connection
        database.CONNECTS.inc()
        database.UP.set(1)
        if self._settings.presence and not await is_direct(connection):
            log.warning("behind a pooler: presence is off, takeover waits for the lease")
        elif self._settings.presence:
            await self._appear(connection)
        self._met.set()

    async def _appear(self, connection: Connection) -> None:
        # Refused while our own earlier session has not ended yet; there is nobody to tell us when it has.
        while not self._closing and not await workers.appear(connection, self._worker, self._presence_key):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _disconnect(self) -> None:
        self._doubtful = True  # somebody may take our tasks while we are away: ask at once when we are back
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
            database.UP.set(0)

    async def _renew(self) -> None:
        assert self._connection is not None
        started = monotonic()
        with self._lock:
            wanted = [held for held in self._held.values() if not held.lost and held.renew_until > started]
        if await workers.seen(self._connection, self._worker):
            self._main_loop.call_soon_threadsafe(self._on_drain)
        if wanted:
            leases = [held.lease for held in wanted]
            asked = perf_counter()
            answers = await claims.renew(self._connection, self._worker, leases, self._settings.lease_seconds)
            metrics.took("renew", asked)
            by_task = {answer.task_id: answer for answer in answers}
            for held in wanted:
                self._heed(held, by_task[held.lease.task_id], started)
            # Somebody who holds a row just now may be taking it from us.
            if all(answer.renewed or not answer.still_ours for answer in answers):
                self._doubtful = False
        else:
            self._doubtful = False
        self._renewed_at = started

    def _heed(self, held: Held, answer: claims.Renewal, started: float) -> None:
        if answer.renewed:
            held.trusted_until = started + self._settings.lease_seconds - self._settings.trust_margin_seconds
        elif not answer.still_ours:
            self._lose(held)
        if answer.cancel:
            self._cancel(held)

    async def _hear_of_cancels(self) -> None:
        """Between renewals: a running step hears within a second that its job was asked to stop."""
        assert self._connection is not None
        with self._lock:
            held = dict(self._held)
        if held:
            for task_id in await claims.to_cancel(self._connection, self._worker, held):
                self._cancel(held[task_id])

    def _cancel(self, held: Held) -> None:
        if not held.cancelled:
            held.cancelled = True
            self._main_loop.call_soon_threadsafe(held.ask)

    def _distrust(self) -> None:
        now = monotonic()
        with self._lock:
            overdue = [held for held in self._held.values() if not held.lost and held.trusted_until <= now]
        for held in overdue:
            self._lose(held)

    def _lose(self, held: Held) -> None:
        with self._lock:
            if self._held.get(held.lease.task_id) is not held:
                return  # settled meanwhile
            held.lost = True
        metrics.LOST.inc()
        held.context.copy().run(log.warning, "lease lost")
        self._main_loop.call_soon_threadsafe(held.stop)
