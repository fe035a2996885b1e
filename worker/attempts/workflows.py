"""Runs workflows: an attempt runs the workflow's function until it waits. inline.py calls `Workflows.drive`.

A driver (leasehold/workflows/driver.py) runs the function's coroutine and collects its calls. When the workflow waits,
the worker commits these calls and gives its lease back: it suspends the workflow. The worker keeps the driver with the
coroutine in memory for a while. The coroutine goes on under the next claim of the same task, if PostgreSQL has
confirmed the suspension to this worker. Otherwise the workflow's function runs again from its top, and the journal (the
rows of its calls) gives it the results of its earlier calls.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar
from uuid import UUID

from leasehold.db.database import Connection, Pool
from leasehold.domain.errors import LeaseLost, ObjectMissing
from leasehold.domain.lease import Lease
from leasehold.runtime.foreign_errors import contained
from leasehold.runtime.transient import TRY_AGAIN
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.telemetry.outages import DATABASE
from leasehold.transitions import concurrency
from leasehold.transitions.runs import CreatedRuns
from leasehold.transitions.settlements import Suspending
from leasehold.transitions.workflows import children, reading
from leasehold.transitions.workflows.reading import Journal, Reading, StoredSignal
from leasehold.transitions.workflows.records import Call, Recording
from leasehold.worker.attempts.journals import Journals
from leasehold.worker.attempts.plain import is_plain
from leasehold.worker.attempts.primary import on_primary
from leasehold.worker.attempts.slot import Slot
from leasehold.worker.attempts.threads import Threads
from leasehold.worker.leases.held_lease import HeldLease
from leasehold.workflows.driver import MAX_CALL_BYTES, Driver, JournalLost
from leasehold.workflows.pending import Outcome, RunCall, StartCall

_Answer = TypeVar("_Answer")

#: A workflow reads results of up to this size from the object store, even if LEASEHOLD_RESULT_MAX_BYTES is smaller now.
#: The setting may have been larger when the result was stored.
_MAX_RESULT_BYTES = 64 * 1024 * 1024

# The object of an output. $1: the task of a step, or the job of a run. $2: the output's name.
_OUTPUT_OF_STEP = "SELECT key, sha256 FROM output WHERE task_id = $1 AND name = $2"
# The run of a workflow also has the tasks of the steps that the workflow has started. The statement leaves these tasks
# (`contained`) out.
_OUTPUT_OF_RUN = (
    "SELECT o.key, o.sha256 FROM task t JOIN output o ON o.task_id = t.id"
    " WHERE t.job_id = $1 AND NOT t.contained AND o.name = $2"
)


@dataclass(slots=True)
class _Suspended:
    """A suspended driver. `epoch`: the epoch of the lease under which it was suspended. `committed`: PostgreSQL has
    confirmed the suspension. `timer`: drops the driver after LEASEHOLD_WORKFLOW_MEMORY_SECONDS.
    """

    driver: Driver
    epoch: int
    timer: asyncio.TimerHandle
    committed: bool = False


class Attempt(Protocol):
    """The part of worker.attempts.inline.InlineAttempt that workflows use."""

    @property
    def lease(self) -> Lease: ...
    @property
    def handler(self) -> tuple[str, str]: ...  # pipeline and step
    @property
    def job_id(self) -> UUID: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def previous_state(self) -> str: ...  # of the task, before the claim
    @property
    def is_last(self) -> bool: ...  # the task fails for good if this attempt fails


class Workflows:
    """Runs all workflow attempts of one worker, and keeps their suspended drivers in memory. `keep_seconds`: a run that
    a workflow has started is kept for this many seconds after its end.
    """

    def __init__(
        self, settings: Settings, pool: Pool, store: ObjectStore, journals: Journals, threads: Threads
    ) -> None:
        self.pool = pool
        self.store = store
        self.journals = journals
        self.threads = threads
        self.keep_seconds = settings.retention_days * 86_400
        self.max_result_bytes = max(_MAX_RESULT_BYTES, settings.result_max_bytes)
        self._max_calls = settings.workflow_max_calls
        # The most bytes of the result of a `ctx.call`. It is never below MAX_CALL_BYTES, because these results always
        # stay in the journal. LEASEHOLD_RESULT_INLINE_BYTES may be 0. That sends the results of tasks to the object
        # store, but not these results.
        self._max_call_bytes = max(MAX_CALL_BYTES, settings.result_inline_bytes)
        self._memory_seconds = settings.workflow_memory_seconds
        self._max_suspended = settings.workflow_memory
        self._suspended: OrderedDict[UUID, _Suspended] = OrderedDict()

    async def drive(
        self, attempt: Attempt, held: HeldLease, slot: Slot, start: Callable[[Driver], Coroutine[Any, Any, Any]]
    ) -> Outcome:
        """Run the workflow until it waits or has ended. `start`: calls the workflow's function for a new driver, and
        returns its coroutine. Raises what `Driver.advance` raises.
        """
        lease = attempt.lease
        driver = self._take(lease, attempt.previous_state) or self._new_driver(attempt, start)
        port = _Port(self, attempt, held, slot)
        try:
            try:
                outcome = await driver.advance(port)
            except JournalLost:  # a failover has undone calls of the kept driver: run the function again from its top
                driver.close()
                driver = self._new_driver(attempt, start)
                outcome = await driver.advance(port)
        except BaseException:
            driver.close()
            raise
        if not outcome.ended:
            # `news`: how many signals and ended steps the driver has seen. If the job has more of them by the time of
            # the commit, the workflow is due again immediately.
            outcome.suspension = Suspending(
                lease, tuple(driver.calls), driver.news, outcome.wakes_after_ends, outcome.delay
            )
            driver.calls_taken()  # this is safe before the commit: if the commit fails, the driver is not used again
            self._keep(driver, lease, outcome)
        return outcome

    def _new_driver(self, attempt: Attempt, start: Callable[[Driver], Coroutine[Any, Any, Any]]) -> Driver:
        return Driver(attempt.job_id, start, self._max_calls, self._max_call_bytes)

    async def call(
        self,
        function: Callable[[], Any],
        slot: Slot,
        handler: tuple[str, str],
        check: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call a function: in the loop if it is an `async def`, else in a thread. While no thread is free, another
        attempt may run in the caller's slot, and `check` is called once a second. `handler`: the caller's pipeline and
        step.
        """
        if _returns_coroutine(function):
            try:
                return await function()
            except (SystemExit, KeyboardInterrupt) as error:
                raise contained(error) from error
        while (thread := await self.threads.reserve(1.0, slot)) is None:
            check()
        return await thread.run(function, handler)

    def settled(self, lease: Lease, *, committed: bool) -> None:
        """Record PostgreSQL's answer to the suspension under this lease: whether it is committed."""
        suspended = self._suspended.get(lease.task_id)
        if suspended is None or suspended.epoch != lease.epoch:
            return
        if committed:
            suspended.committed = True
        else:
            self._drop(lease.task_id, suspended)

    def close(self) -> None:
        """Drop all kept drivers, because the worker ends."""
        for task_id, suspended in list(self._suspended.items()):
            self._drop(task_id, suspended)

    def _take(self, lease: Lease, previous_state: str) -> Driver | None:
        """The kept driver of the task, if it may go on; else None. It may go on if no other claim has run the task
        since the driver suspended here, and if PostgreSQL still has the suspension. `previous_state` shows whether
        PostgreSQL has it: the state is `waiting` unless a failover has undone the suspension, and with it the
        consumption of signals.
        """
        suspended = self._suspended.get(lease.task_id)
        if suspended is None:
            return None
        if not suspended.committed or suspended.epoch + 1 != lease.epoch or previous_state != "waiting":
            self._drop(lease.task_id, suspended)
            return None
        suspended.timer.cancel()
        del self._suspended[lease.task_id]
        return suspended.driver

    def _keep(self, driver: Driver, lease: Lease, outcome: Outcome) -> None:
        """Keep the driver for a while if the workflow waits for a step, or for a time that comes before the driver
        would be dropped. Otherwise close the driver.
        """
        wakes_in_time = outcome.delay is not None and outcome.delay < self._memory_seconds
        may_be_due_soon = outcome.wakes_after_ends is not None or wakes_in_time
        if not may_be_due_soon or not self._max_suspended:
            driver.close()
            return
        while len(self._suspended) >= self._max_suspended:
            self._drop(*next(iter(self._suspended.items())))  # the oldest
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._memory_seconds, self._expire, lease)
        self._suspended[lease.task_id] = _Suspended(driver, lease.epoch, timer)

    def _expire(self, lease: Lease) -> None:
        # If the driver has gone on and was suspended again, the kept driver has another epoch, and its own timer.
        suspended = self._suspended.get(lease.task_id)
        if suspended is not None and suspended.epoch == lease.epoch:
            self._drop(lease.task_id, suspended)

    def _drop(self, task_id: UUID, suspended: _Suspended) -> None:
        suspended.timer.cancel()
        self._suspended.pop(task_id, None)
        suspended.driver.close()


class _Port:
    """One attempt's access to its journal. It implements leasehold.workflows.port.Port, which describes the methods."""

    def __init__(self, workflows: Workflows, attempt: Attempt, held: HeldLease, slot: Slot) -> None:
        self._workflows = workflows
        self._slot = slot
        self._handler = attempt.handler
        self._tenant = attempt.tenant_id
        self._is_last_attempt = attempt.is_last
        lease = attempt.lease
        self._lease = lease
        self._held = held

    # A place is the branch (the concurrent part of the workflow) that made a call, and the call's number in the branch.
    async def read(self, places: Sequence[tuple[str, int]] | None) -> Journal:
        # First try a small read (of at most SHORT rows), in one round trip with the reads of other workflows. Of a
        # longer journal this read returns only the beginning, and sets `is_cut`.
        if places is None or len(places) <= reading.SHORT:
            journal = await self._workflows.journals.read(Reading(self._lease, places))
            if journal is None:
                raise LeaseLost
            if not journal.is_cut:
                return journal
        # Read many rows on another connection, so that the small reads of other workflows do not wait for them.
        return await self._on_primary(lambda connection: reading.read(connection, self._lease, places))

    async def signal(self, name: str, after: int) -> StoredSignal | None:
        return await self._on_primary(lambda connection: reading.read_signal(connection, self._lease, name, after))

    async def _on_primary(self, work: Callable[[Connection], Awaitable[_Answer]]) -> _Answer:
        return await on_primary(self._workflows.pool, self._held, work)

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        self.check()
        recorded = await self._workflows.journals.record(Recording(self._lease, tuple(calls), cancelling))
        # `recorded.cancelling`: the run is being cancelled. `cancelling`: the workflow has seen the cancel. While the
        # lease is valid, PostgreSQL refuses the calls only if the run is being cancelled and the workflow has not seen
        # the cancel.
        has_unseen_cancel = recorded.cancelling and not cancelling
        if not recorded.committed and not has_unseen_cancel:
            raise LeaseLost
        return recorded.committed

    async def start(
        self, call: StartCall[Any] | RunCall[Any], record: Call, wait: Call | None = None, *, again: bool = False
    ) -> bool:
        self.check()
        workflows = self._workflows
        assert record.child is not None
        new_run = call.task.new_run(record.child, self._tenant, call.argument, workflows.keep_seconds)

        async def write(connection: Connection) -> CreatedRuns | None:
            async with connection.transaction():
                return await children.start(connection, self._lease, record, new_run, wait, again=again)

        created = await self._on_primary(write)
        if created is None:
            return False
        workflows.journals.announce(created.hints)
        if created.limits:
            try:
                async with workflows.pool.acquire() as connection:
                    workflows.journals.announce(await concurrency.admit(connection, created.limits))
            except TRY_AGAIN as error:  # the run is committed, so the duty `admissions` admits it a little later
                DATABASE.record_error(error, "admitting runs")
        return True

    async def fetch(self, child: UUID, output: str, *, is_run: bool) -> bytes:
        statement = _OUTPUT_OF_RUN if is_run else _OUTPUT_OF_STEP
        row = await self._on_primary(lambda connection: connection.fetchrow(statement, child, output))
        if row is None:
            raise ObjectMissing(f"the step has no output {output}")
        max_bytes = self._workflows.max_result_bytes
        return await self._workflows.store.fetch_bytes(row["key"], sha256=row["sha256"], max_bytes=max_bytes)

    async def call(self, function: Callable[[], Any]) -> Any:
        return await self._workflows.call(function, self._slot, self._handler, self.check)

    def cancelled(self) -> bool:
        return self._held.cancelled

    def is_last_attempt(self) -> bool:
        return self._is_last_attempt

    def check(self) -> None:
        if not self._held.trusted():
            raise LeaseLost


def _returns_coroutine(function: Callable[[], Any]) -> bool:
    return not is_plain(function.func if isinstance(function, partial) else function)
