"""Workers one after the other drive a run, by the very statements of a real worker: each may die at any point, and a
client may cancel at any point.

A death is a worker that stops answering: its statements before the point are committed, and nothing that follows is
sent. Its lease is then taken over, as the sweeper does with the leases of workers whose presence has ended.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.domain.errors import Cancelled, LeaseLost
from leasehold.transitions import claims, concurrency, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Suspending, Verdict
from leasehold.transitions.workflows import children, reading, recording
from leasehold.transitions.workflows.reading import Journal, Reading, StoredSignal
from leasehold.transitions.workflows.records import Call, Recording
from leasehold.workflows.context import Context
from leasehold.workflows.driver import Driver
from tests.factories import Rows, assert_history, terms
from tests.workflows import shop
from tests.workflows.conftest import Runs

MAX_CALLS = 1000


class Died(BaseException):
    """The worker is gone."""


async def _nobody() -> None: ...


@dataclass
class Deaths:
    """Counts the points of a worker's life: dies at the `at`-th, and a client cancels at the `cancel_at`-th. A point
    lies before and after each commit.
    """

    at: int = 0
    cancel_at: int = 0
    reached: int = 0
    cancel: Callable[[], Awaitable[None]] = _nobody

    async def point(self) -> None:
        self.reached += 1
        if self.reached == self.cancel_at:
            await self.cancel()
        if self.reached == self.at:
            raise Died


@dataclass
class Port:
    """The journal of one attempt, by the very statements of the worker. `turn`: all have one connection, and functions
    run while a row is recorded.
    """

    connection: Connection
    claimed: Claimed
    deaths: Deaths
    made: list[str]
    hears: Callable[[], bool]
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def read(self, places: Sequence[tuple[str, int]] | None) -> Journal:
        if places is None or len(places) <= reading.SHORT:
            (journal,) = await reading.read_each(self.connection, [Reading(self.claimed.lease, places)])
            if journal is None:
                raise LeaseLost
            if not journal.is_cut:
                return journal
        return await reading.read(self.connection, self.claimed.lease, places)

    async def signal(self, name: str, after: int) -> StoredSignal | None:
        async with self.turn:
            return await reading.read_signal(self.connection, self.claimed.lease, name, after)

    async def record(self, calls: Sequence[Call], *, cancelling: bool) -> bool:
        async with self.turn:
            await self.deaths.point()
            one = Recording(self.claimed.lease, tuple(calls), cancelling)
            answers, _ = await recording.record(self.connection, [one])
            await self.deaths.point()
        recorded = answers[self.claimed.lease.task_id]
        if not recorded.committed and (cancelling or not recorded.cancelling):
            raise LeaseLost
        return recorded.committed

    async def start(self, call: Any, record: Call, wait: Call | None = None, *, again: bool = False) -> bool:
        async with self.turn:
            await self.deaths.point()
            new = call.task.new_run(record.child, "t", call.argument, 3600)
            async with self.connection.transaction():
                created = await children.start(self.connection, self.claimed.lease, record, new, wait, again=again)
            await self.deaths.point()
        return created is not None

    async def fetch(self, child: UUID, output: str, *, is_run: bool) -> bytes:
        raise NotImplementedError

    async def call(self, function: Callable[[], Any]) -> Any:
        async with self.turn:
            await self.deaths.point()
        self.made.append(getattr(function, "func", function).__name__)
        return await function()

    def cancelled(self) -> bool:
        return self.hears()

    def is_last_attempt(self) -> bool:
        return False

    def check(self) -> None: ...


def _task_of(claimed: Claimed) -> str:
    """The name of the task whose code is the step's. Only a step that a workflow has started names its handler."""
    return claimed.pipeline if claimed.handler is None else claimed.handler.rpartition(".")[0]


@dataclass
class Life:
    """Workers one after the other: the first dies at a point, the second goes on."""

    runs: Runs
    keeps: bool  # coroutines in memory
    rng: random.Random
    deaths: Deaths = field(default_factory=Deaths)
    made: list[str] = field(default_factory=list)
    kept: dict[UUID, tuple[int, Driver]] = field(default_factory=dict)
    terms: Any = field(default_factory=terms)
    before: int = 0  # jobs
    asked: str | None = None  # the status of the run after the request of its cancel
    journal_then: int = 0  # rows

    async def live(self, run: UUID, arguments: tuple[Any, ...], signals: Sequence[str]) -> None:
        """Claim and run what is due until the run has ended."""
        waiting = list(signals)
        for _ in range(500):
            if await self.runs.connection.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", run):
                return
            try:
                due = await self.due()
                await children.wake_waiting(self.runs.connection)
                waiting_limits = await concurrency.with_waiting_jobs(self.runs.connection, ("", ""))
                await concurrency.admit(self.runs.connection, waiting_limits)
                if not due and waiting and self.rng.random() < 0.5:
                    name = waiting.pop(0)
                    await self.runs.signal(run, name, {"by": f"{name} {len(waiting)}"})
                while due:
                    claimed = due.pop(0)
                    await self.deaths.point()
                    if not shop.app.tasks[_task_of(claimed)].runnable.is_workflow:
                        following = await self._child(claimed)
                    else:
                        following = await self.drive(claimed, arguments if claimed.job_id == run else (shop.SEVEN,))
                    if following is not None:  # the settlement claimed it: the same slot runs it
                        due.insert(0, following)
                await children.cancel_orphans(self.runs.connection)
            except Died:
                await self._take_over(run)
        pytest.fail(f"the run does not end: {await self.runs.steps(run)} {await self.runs.journal(run)}")

    async def due(self) -> list[Claimed]:
        await self.runs.connection.execute(  # time passes
            "UPDATE task t SET available_at = clock_timestamp() WHERE status = 'waiting' AND isfinite(available_at)"
        )
        # Or PostgreSQL's clock goes back: sleeps that are over would not be, by the clock alone.
        ahead = 60.0 if self.rng.random() < 0.25 else 0.0
        await self.runs.connection.execute(
            "UPDATE journal SET due_at = clock_timestamp() + make_interval(secs => $1) WHERE due_at IS NOT NULL", ahead
        )
        due = await claims.claim_due(self.runs.connection, self.terms, ["default"], 3)
        self.rng.shuffle(due)
        return due

    async def _child(self, claimed: Claimed) -> Claimed | None:
        task = shop.app.tasks[_task_of(claimed)]
        await self.deaths.point()
        following: Claimed | None = None
        params = task.arguments.model.model_validate(claimed.params)
        if task is shop.refuse:
            failure = Failure(claimed.lease, "error", "refused", "no such card", False, 0.0)
            await settlements.fail(self.runs.connection, [failure])
        else:
            positional, named = task.arguments.decoded(params)
            result = task.function(*positional, **named)
            value = await result if isinstance(result, Coroutine) else result
            done = Completion(claimed.lease, value={"value": value}, claim_next=self._has_room())
            settled = await settlements.complete(self.runs.connection, [done], self.terms)
            following = settled.next_steps.get(claimed.lease.task_id)
        await self.deaths.point()
        return following

    def _has_room(self) -> bool:
        """A worker may claim the next step with its settlement, or leave it to a hint."""
        return self.rng.random() < 0.5

    async def drive(self, claimed: Claimed, arguments: tuple[Any, ...]) -> Claimed | None:
        epoch, driver = self.kept.pop(claimed.job_id, (0, None))
        if driver is None or epoch + 1 != claimed.lease.epoch:
            workflow = shop.app.tasks[claimed.pipeline]
            driver = Driver(claimed.job_id, lambda it: workflow.function(Context(it), *arguments), MAX_CALLS)
        port = Port(self.runs.connection, claimed, self.deaths, self.made, self._hears)
        try:
            outcome = await driver.advance(port)
        except Died:
            async with port.turn:  # a function of the workflow, now cancelled, may be in the middle of a statement
                raise
        except Cancelled:
            await self.deaths.point()
            await settlements.acknowledge_cancel(self.runs.connection, [claimed.lease])
            await self.deaths.point()
            return None
        await self.deaths.point()
        if outcome.ended:
            done = Completion(claimed.lease, value={"value": outcome.result})
            settled = await settlements.complete(self.runs.connection, [done])
        else:
            starts = [call.child for call in driver.calls if call.step is not None]
            chosen = starts[0] if starts and self._has_room() else None
            calls = tuple(driver.calls)
            suspending = Suspending(claimed.lease, calls, driver.news, outcome.wakes_after_ends, outcome.delay, chosen)
            settled = await settlements.suspend(self.runs.connection, [suspending], self.terms)
        await self.deaths.point()
        if settled.verdicts[claimed.lease.task_id] is not Verdict.SETTLED:
            await self._refused(claimed)
            return None
        driver.calls_taken()
        if self.keeps and not outcome.ended:
            self.kept[claimed.job_id] = claimed.lease.epoch, driver
        return settled.next_steps.get(claimed.lease.task_id)

    async def _refused(self, claimed: Claimed) -> None:
        """As worker.leases.settlement_batcher: the cancel came before the suspension."""
        assert self.asked == "cancel_requested"
        released = await settlements.release(self.runs.connection, [claimed.lease])
        if released.verdicts[claimed.lease.task_id] is not Verdict.SETTLED:
            acknowledged = await settlements.acknowledge_cancel(self.runs.connection, [claimed.lease])
            assert acknowledged.verdicts[claimed.lease.task_id] is Verdict.SETTLED

    def _hears(self) -> bool:
        """The heartbeat may hear of the cancel at any time, or not before the worker's next write."""
        return self.asked == "cancel_requested" and self.rng.random() < 0.5

    async def cancel(self, run: UUID) -> None:
        """Twice: the second request changes nothing."""
        self.journal_then = len(await self.runs.journal(run))
        self.asked = await self.runs.cancel(run) or "ended"
        assert await self.runs.cancel(run) is None

    async def _take_over(self, run: UUID) -> None:
        """The worker is gone, with what it had in memory; its leases are free."""
        self.kept.clear()
        self.terms = terms()
        await self.runs.connection.execute(
            "UPDATE task SET lease_until = clock_timestamp() - interval '1 s' WHERE status = 'running'"
        )
        await sweeps.expire_leases(self.runs.connection, [], 5)
        await sweeps.end_cancels(self.runs.connection, [], 5)
        await assert_history(Rows(self.runs.connection, self.terms), run)
