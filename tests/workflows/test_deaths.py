"""A worker dies at every call of the context, before and after each commit: the run ends once, with the same result,
and each effect is committed once.

A death is a worker that stops answering: its statements before the point are committed, and nothing that follows is
sent. Its lease is then taken over, as the sweeper does with the leases of workers whose presence has ended.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from leasehold.db.database import Connection
from leasehold.domain.errors import LeaseLost
from leasehold.transitions import claims, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Suspending, Verdict
from leasehold.transitions.workflows import children, reading, recording
from leasehold.transitions.workflows.reading import Journal
from leasehold.transitions.workflows.records import Call, Recording
from leasehold.workflows.context import Context
from leasehold.workflows.driver import Driver
from tests.factories import Rows, assert_history, terms
from tests.support.seeds import seed_of_this_commit
from tests.workflows import shop
from tests.workflows.conftest import Runs
from tests.workflows.promises import assert_journal

MAX_CALLS = 1000


class Died(BaseException):
    """The worker is gone."""


@dataclass
class Deaths:
    """Counts the points of a worker's life, and dies at the `at`-th. A point lies before and after each commit."""

    at: int = 0
    reached: int = 0

    def point(self) -> None:
        self.reached += 1
        if self.reached == self.at:
            raise Died


@dataclass
class Port:
    """The journal of one attempt, by the very statements of the worker."""

    connection: Connection
    claimed: Claimed
    deaths: Deaths
    made: list[str]

    async def read(self, places: Sequence[tuple[str, int]] | None) -> Journal:
        return await reading.read(self.connection, self.claimed.lease, places)

    async def record(self, calls: Sequence[Call]) -> bool:
        self.deaths.point()
        answers, _ = await recording.record(self.connection, [Recording(self.claimed.lease, tuple(calls))])
        self.deaths.point()
        if not answers[self.claimed.lease.task_id].kept:
            raise LeaseLost
        return True

    async def start(self, call: Any, record: Call) -> bool:
        self.deaths.point()
        new = call.task.new_run(record.child, "t", call.argument, 3600)
        async with self.connection.transaction():
            created = await children.start(self.connection, self.claimed.lease, record, new)
        self.deaths.point()
        return created is not None

    async def fetch(self, task_id: UUID, output: str) -> bytes:
        raise NotImplementedError

    async def call(self, function: Callable[[], Any]) -> Any:
        self.made.append("call")
        return await function()

    def cancelled(self) -> bool:
        return False

    def check(self) -> None: ...


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

    async def live(self, run: UUID, arguments: tuple[Any, ...], signals: Sequence[str]) -> None:
        """Claim and run what is due until the run has ended."""
        waiting = list(signals)
        for _ in range(500):
            if await self.runs.connection.fetchval("SELECT finished_at IS NOT NULL FROM job WHERE id = $1", run):
                return
            try:
                due = await self._due()
                await children.wake_waiting(self.runs.connection)
                if not due and waiting and self.rng.random() < 0.5:
                    name = waiting.pop(0)
                    await self.runs.signal(run, name, {"by": f"{name} {len(waiting)}"})
                for claimed in due:
                    self.deaths.point()
                    if "#" in claimed.step:
                        await self._child(claimed)
                    else:
                        await self._drive(claimed, arguments if claimed.job_id == run else (shop.SEVEN,))
            except Died:
                await self._take_over(run)
        pytest.fail(f"the run does not end: {await self.runs.steps(run)} {await self.runs.journal(run)}")

    async def _due(self) -> list[Claimed]:
        await self.runs.connection.execute(  # time passes
            "UPDATE task t SET available_at = clock_timestamp() WHERE status = 'waiting' AND isfinite(available_at)"
        )
        await self.runs.connection.execute("UPDATE journal SET due_at = clock_timestamp() WHERE due_at IS NOT NULL")
        due = await claims.claim_due(self.runs.connection, self.terms, ["default"], 3)
        self.rng.shuffle(due)
        return due

    async def _child(self, claimed: Claimed) -> None:
        task = next(task for task in shop.app.tasks.values() if task.runnable.handler == claimed.handler)
        self.deaths.point()
        params = task.arguments.model.model_validate(claimed.params)
        if task is shop.refuse:
            failure = Failure(claimed.lease, "error", "refused", "no such card", False, 0.0)
            await settlements.fail(self.runs.connection, [failure])
        else:
            positional, named = task.arguments.decoded(params)
            result = task.function(*positional, **named)
            value = await result if isinstance(result, Coroutine) else result
            done = Completion(claimed.lease, value={"value": value})
            await settlements.complete(self.runs.connection, [done])
        self.deaths.point()

    async def _drive(self, claimed: Claimed, arguments: tuple[Any, ...]) -> None:
        epoch, driver = self.kept.pop(claimed.job_id, (0, None))
        if driver is None or epoch + 1 != claimed.lease.epoch:
            workflow = shop.app.tasks[claimed.pipeline]
            driver = Driver(claimed.job_id, lambda it: workflow.function(Context(it), *arguments), MAX_CALLS)
        port = Port(self.runs.connection, claimed, self.deaths, self.made)
        outcome = await driver.advance(port)
        self.deaths.point()
        if outcome.ended:
            done = Completion(claimed.lease, value={"value": outcome.result})
            settled = await settlements.complete(self.runs.connection, [done])
        else:
            suspending = Suspending(claimed.lease, tuple(driver.calls), driver.news, outcome.ends, outcome.delay)
            settled = await settlements.suspend(self.runs.connection, [suspending])
        assert settled.verdicts[claimed.lease.task_id] is Verdict.SETTLED
        self.deaths.point()
        driver.committed()
        if self.keeps and not outcome.ended:
            self.kept[claimed.job_id] = claimed.lease.epoch, driver

    async def _take_over(self, run: UUID) -> None:
        """The worker is gone, with what it had in memory; its leases are free."""
        self.kept.clear()
        self.terms = terms()
        await self.runs.connection.execute(
            "UPDATE task SET lease_until = clock_timestamp() - interval '1 s' WHERE status = 'running'"
        )
        await sweeps.expire_leases(self.runs.connection, [], 5)
        await assert_history(Rows(self.runs.connection, self.terms), run)


WORKFLOWS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...], Any]] = {
    "steps": (shop.checkout, (shop.Order(id=7, amount=5),), (), "7: 5"),
    "branches": (shop.fans, (3,), (), [6, 0, 4, 8]),
    "compensation": (shop.compensates, ("stolen",), (), "refused; 42"),
    "signals": (shop.approved, (None,), ("approved", "approved"), "approved 1, approved 0"),
    "child": (shop.starts, (), (), "7: 5"),
    "everything": (shop.everything, (), ("go",), ["drawn", 2, [4, 6], "go 0", "refused"]),
}


async def _once(runs: Runs, name: str, at: int, seed: int, *, keeps: bool) -> int:
    """One run whose worker dies at point `at`. Returns how many points there were."""
    workflow, arguments, signals, expected = WORKFLOWS[name]
    life = Life(runs, keeps, random.Random(seed), Deaths(at))
    life.before = await runs.connection.fetchval("SELECT count(*) FROM job")
    run = await runs.submit(workflow, *arguments)
    await life.live(run, arguments, signals)
    status, result = await runs.ended(run)
    assert (status, result) == ("succeeded", expected), (name, at, seed)
    completed = Counter(
        row["task_id"]
        for row in await runs.connection.fetch(
            "SELECT task_id FROM event WHERE job_id = $1 AND kind = 'completed'", run
        )
    )
    assert set(completed.values()) == {1}
    assert await runs.connection.fetchval("SELECT count(*) FROM signal WHERE job_id = $1", run) == 0
    assert await runs.connection.fetchval("SELECT count(*) FROM job") == life.before + (2 if name == "child" else 1)
    await assert_journal(runs.connection, run)
    places = await runs.journal(run)
    assert len({row[:2] for row in places}) == len(places)
    await assert_history(Rows(runs.connection, life.terms), run)
    return life.deaths.reached


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "replayed"])
@pytest.mark.parametrize("name", WORKFLOWS)
async def test_a_workflow_whose_worker_dies_at_any_point_ends_once_with_the_same_result(
    runs: Runs, name: str, keeps: bool
) -> None:
    seed = seed_of_this_commit()
    points = await _once(runs, name, 0, seed, keeps=keeps)
    assert points > 5
    for at in range(1, points + 1):
        await _once(runs, name, at, seed, keeps=keeps)
