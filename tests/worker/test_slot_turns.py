"""Whose turn it is in a slot pool: what its polls claim, which slots they keep, and when a job gives up its slot."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import asyncpg
import pytest
import structlog

from leasehold.broker.base import Delivery, Hint
from leasehold.runtime import failpoints
from leasehold.transitions.claims import Claimed, Polled
from leasehold.worker.attempts.slot import Slot
from leasehold.worker.claiming import slot_pool as pools
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.claiming.slot_pool import SlotPool
from tests.worker.test_slots import NEVER, SECONDS, broker_with_hints, claimed

Found = Polled | Callable[[], Polled | Awaitable[Polled]]


def task(step: str, tenant: str = "t", was: str = "pending") -> Claimed:
    return replace(claimed(step), tenant_id=tenant, previous_state=was)


class Stage:
    """A pool whose time stands still. It polls when a test says so, and an attempt runs until the test ends it."""

    def __init__(self, slots: int, reserve: int = 0, **broker: Any) -> None:
        self.now = 0.0
        self.found: list[Found] = []  # the answers to the next polls; then a poll finds nothing
        self.asked: list[tuple[int, float, Rooms]] = []  # of each poll: the limit, the overdue seconds, the rooms
        self.running: dict[str, Slot] = {}
        self.acked: set[str] = set()
        self.held: set[UUID] = set()
        self.rebuilt = 0
        self.broker = broker_with_hints(rebuild_consumer=self._rebuild, last_delivery_at=None, **broker)
        self._hinted: dict[UUID, Claimed] = {}
        self._ends: dict[str, asyncio.Event] = {}
        claimer: Any = SimpleNamespace(
            claim=self._claim,
            poll=self._poll,
            holds=self.held.__contains__,
            holds_for_certain=self.held.__contains__,
        )
        runner: Any = SimpleNamespace(run=self._run)
        self.pool = SlotPool(
            ["q"], slots, reserve=reserve, claimer=claimer, runner=runner, broker=self.broker, poll_seconds=NEVER
        )

    async def settle(self) -> None:
        """Let everything go on that can."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def hint(self, step: str, tenant: str = "t", ack: Callable[[], Awaitable[None]] | None = None) -> UUID:
        one = task(step, tenant)
        self._hinted[one.lease.task_id] = one

        async def note() -> None:
            self.acked.add(step)

        self.pool.deliver(Delivery(Hint(one.lease.task_id, "q", tenant=tenant), ack or note))
        await self.settle()
        return one.lease.task_id

    async def poll(self, *found: Found) -> None:
        self.found += found
        self.pool.poll_soon()
        await self.settle()

    async def wait_for_turn(self) -> None:
        """The pool has been full for so long that the next slot is for others, if others wait."""
        await self.poll()
        self.now += NEVER
        await self.poll()

    async def end(self, *steps: str) -> None:
        for step in steps:
            self._ends[step].set()
        await self.settle()

    def _rebuild(self) -> None:
        self.rebuilt += 1

    async def _claim(self, delivery: Delivery) -> Claimed:
        return self._hinted[delivery.hint.task_id]

    async def _poll(self, _queues: object, limit: int, overdue: float, rooms: Rooms) -> Polled:
        self.asked.append((limit, overdue, rooms))
        found = self.found.pop(0) if self.found else Polled([])
        if isinstance(found, Polled):
            return found
        answer = found()
        return answer if isinstance(answer, Polled) else await answer

    async def _run(self, one: Claimed, _headers: object, slot: Slot) -> None:
        self.running[one.step] = slot
        self._ends[one.step] = asyncio.Event()
        try:
            await self._ends[one.step].wait()
        finally:
            del self.running[one.step]


@pytest.fixture(autouse=True)
def disarmed() -> Any:
    yield
    failpoints.arm("")


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Any:
    @asynccontextmanager
    async def started(
        slots: int, reserve: int = 0, found: tuple[Found, ...] = (), **broker: Any
    ) -> AsyncIterator[Stage]:
        stage = Stage(slots, reserve, **broker)
        stage.found += found
        monkeypatch.setattr(pools, "monotonic", lambda: stage.now)
        monkeypatch.setattr(pools, "_FAIR_SECONDS", NEVER)
        monkeypatch.setattr(pools, "_SILENCE_SECONDS", 0.0)
        stage.pool.start()
        try:
            await stage.settle()
            yield stage
        finally:
            await stage.pool.close()

    return started


# --- polls


@pytest.mark.parametrize(
    ("delivers_hints", "connected", "overdue"),
    [(True, True, [NEVER, 0.0, NEVER]), (True, False, [0.0] * 3), (False, True, [0.0] * 3)],
)
async def test_a_poll_leaves_new_tasks_to_their_hints_only_while_no_hint_may_be_lost(
    stages: Any, *, delivers_hints: bool, connected: bool, overdue: list[float]
) -> None:
    async with stages(3, delivers_hints=delivers_hints, connected=connected) as stage:
        await stage.poll(Polled([task("retry", was="retry")]))
        assert [seconds for _limit, seconds, _rooms in stage.asked] == overdue


@pytest.mark.parametrize(("slots", "limits"), [(3, [1, 1, 1]), (4, [2, 2])])
async def test_tasks_that_no_hint_announces_fill_all_slots_at_once(stages: Any, slots: int, limits: list[int]) -> None:
    """Each poll claims for half of the slots at most."""
    steps = iter(range(slots))
    found = [Polled([task(f"{next(steps)}", was="retry") for _ in range(limit)]) for limit in limits]
    async with stages(slots, found=tuple(found)) as stage:
        assert [limit for limit, _overdue, _rooms in stage.asked] == limits
        assert len(stage.running) == slots


async def test_after_a_poll_that_failed_hints_go_on_and_the_next_poll_is_the_regular_one(stages: Any) -> None:
    def fail() -> Polled:
        raise RuntimeError("the first poll fails")

    async with stages(1, found=(fail,), delivers_hints=False) as stage:
        await stage.hint("A")
        assert list(stage.running) == ["A"]
        assert len(stage.asked) == 1
    async with stages(1, found=(fail,), delivers_hints=False) as stage:
        await stage.poll(Polled([task("polled")]))
        assert list(stage.running) == ["polled"]


async def test_the_log_names_the_unforeseen_error_of_a_poll(stages: Any) -> None:
    """Perhaps every poll fails: then hints still start tasks, and no retry does."""

    def fail() -> Polled:
        raise asyncpg.InsufficientPrivilegeError("permission denied for table task")

    with structlog.testing.capture_logs() as lines:
        async with stages(1, found=(fail,)):
            pass
    errors = [(line["log_level"], line["error"]) for line in lines if "error" in line]
    assert errors == [("error", "InsufficientPrivilegeError")]


async def test_a_task_held_back_for_an_attempt_that_ended_meanwhile_is_polled_for_again_at_once(stages: Any) -> None:
    async with stages(2, found=(Polled([task("A", was="retry")], held_back=True),)) as stage:
        stage.found = [Polled([], held_back=True), Polled([task("B", was="retry")])]
        await stage.end("A")
        assert list(stage.running) == ["B"]


async def test_once_a_poll_finds_nothing_tasks_that_are_held_back_are_left_to_their_hints(stages: Any) -> None:
    """Until then, the polls had found only tasks that no hint announces."""
    async with stages(4, found=(Polled([task("A", was="retry")]),)) as stage:
        await stage.poll(Polled([]))
        await stage.poll(Polled([], held_back=True))
        await stage.end("A")
        assert len(stage.asked) == 3


@pytest.mark.parametrize(("busy", "crowded"), [(4, False), (5, True)])
async def test_a_pool_is_crowded_from_a_quarter_of_its_slots(stages: Any, busy: int, *, crowded: bool) -> None:
    """From then on, the broker may hold back the hints of newcomers, and polls look for their tasks."""
    async with stages(20) as stage:
        for number in range(busy):
            await stage.hint(f"{number}")
        await stage.poll()
        assert (stage.asked[-1][2].others_overdue is not None) == crowded


# --- the slot that is kept for a poll


async def test_the_next_slot_of_a_pool_that_stays_full_is_for_a_newcomer_and_only_that_one(stages: Any) -> None:
    async with stages(1) as stage:
        await stage.hint("A")
        await stage.hint("B")
        assert stage.running["A"].may_continue()
        await stage.wait_for_turn()
        assert not stage.running["A"].may_continue()
        await stage.poll()  # still full: the slot stays promised
        assert not stage.running["A"].may_continue()
        stage.found = [Polled([task("newcomer", "newcomer")])]
        await stage.end("A")
        assert list(stage.running) == ["newcomer"]
        await stage.end("newcomer")
        assert list(stage.running) == ["B"]
        assert stage.acked == {"A"}


async def test_slots_that_become_free_together_with_the_kept_one_are_filled_by_the_same_poll(stages: Any) -> None:
    """No hint waits here: the broker holds them back while the pool is full."""
    async with stages(4) as stage:
        for step in "ABCD":
            await stage.hint(step)
        await stage.wait_for_turn()
        polls = len(stage.asked)
        stage.found = [Polled([task("first", "newcomer")]), Polled([task("second"), task("third")])]
        await stage.end(*"ABCD")
        assert [limit for limit, _overdue, _rooms in stage.asked[polls:]] == [1, 2]
        assert list(stage.running) == ["first", "second", "third"]


async def test_a_pool_that_stops_during_a_poll_runs_what_it_has_claimed_and_claims_no_more(stages: Any) -> None:
    async with stages(4) as stage:
        for step in "ABCD":
            await stage.hint(step)
        await stage.wait_for_turn()
        polls = len(stage.asked)

        def stop() -> Polled:
            stage.pool.stop_claiming()
            return Polled([task("claimed")])

        stage.found = [stop, Polled([task("not asked for")])]
        await stage.end(*"ABCD")
        assert len(stage.asked) == polls + 1
        assert list(stage.running) == ["claimed"]


async def test_a_job_of_many_steps_leaves_its_slot_if_a_hint_waits_for_long_though_the_reserve_is_free(
    stages: Any,
) -> None:
    async with stages(1, reserve=1) as stage:
        await stage.hint("A")
        await stage.hint("B")
        await stage.poll()
        assert stage.running["A"].may_continue()
        await stage.wait_for_turn()
        assert not stage.running["A"].may_continue()


async def test_a_full_pool_polls_for_its_reserve_and_keeps_no_slot_if_nobody_waits(stages: Any) -> None:
    async with stages(1, reserve=1) as stage:
        await stage.hint("A")
        polls = len(stage.asked)
        await stage.wait_for_turn()
        assert [limit for limit, _overdue, _rooms in stage.asked[polls:]] == [1, 1]
        assert stage.running["A"].may_continue()
        await stage.hint("newcomer", "newcomer")  # a slot that is kept would count as one of the reserve
        assert list(stage.running) == ["A", "newcomer"]


async def test_a_kept_slot_is_given_back_when_nobody_waits_any_more(stages: Any) -> None:
    async with stages(1, reserve=2) as stage:
        await stage.hint("A")
        duplicate = await stage.hint("B")
        await stage.wait_for_turn()
        assert not stage.running["A"].may_continue()
        stage.held.add(duplicate)  # it turns out that this worker holds the task
        await stage.poll()
        assert stage.acked == {"B"}
        assert stage.running["A"].may_continue()
        for newcomer in ("first", "second"):
            await stage.hint(newcomer, newcomer)
        assert list(stage.running) == ["A", "first", "second"]


async def test_a_pool_with_a_free_slot_keeps_none_for_polls(stages: Any) -> None:
    """A tenant at its share waits, and the slot is free for all others."""
    async with stages(7, reserve=7) as stage:
        for number in range(8):
            await stage.hint(f"{number}", "flood")
        assert len(stage.running) == 7
        await stage.wait_for_turn()
        assert all(slot.may_continue() for slot in stage.running.values())


# --- when a job leaves its slot between two steps


async def test_a_job_leaves_its_slot_to_a_tenant_that_runs_less(stages: Any) -> None:
    async with stages(2) as stage:
        for step in "AB":
            await stage.hint(step, "flood")
        assert stage.running["A"].may_continue()
        await stage.hint("C", "newcomer")
        assert not stage.running["A"].may_continue()
        await stage.end("A")
        assert list(stage.running) == ["B", "C"]
        assert stage.running["B"].may_continue()
        assert stage.running["C"].may_continue()


async def test_a_job_of_a_tenant_that_is_over_its_share_leaves_its_slot(stages: Any) -> None:
    """Its share became smaller when another tenant began to use the reserve."""
    async with stages(2, reserve=2) as stage:
        for step in "AB":
            await stage.hint(step, "flood")
        assert stage.running["A"].may_continue()
        await stage.hint("C", "newcomer")
        assert list(stage.running) == ["A", "B", "C"]
        assert not stage.running["A"].may_continue()
        assert stage.running["C"].may_continue()


async def test_a_pool_that_stops_forgets_its_hints_and_lets_no_job_go_on(stages: Any) -> None:
    async with stages(1) as stage:
        await stage.hint("A")
        await stage.hint("B")
        stage.pool.stop_claiming()
        assert not stage.running["A"].may_continue()
        assert stage.pool.waiting_hints("t") == 0
        await stage.end("A")
        assert stage.running == {}
        assert stage.acked == {"A"}  # the broker gives B to another worker
        async with asyncio.timeout(SECONDS):
            await stage.pool.finished()  # it does not wait for the next poll


# --- attempts and their slots


async def test_an_attempt_that_takes_its_slot_back_counts_again_and_may_lend_it_again(stages: Any) -> None:
    async with stages(1) as stage:
        for step in "ABCDE":
            await stage.hint(step)
        with stage.running["A"].lent():
            await stage.settle()
            assert list(stage.running) == ["A", "B"]
        await stage.end("A")
        assert list(stage.running) == ["B"]
        await stage.end("B")
        assert list(stage.running) == ["C"]
        with stage.running["C"].lent():
            await stage.settle()
            assert list(stage.running) == ["C", "D"]
            with stage.running["D"].lent():  # one waits without a slot already
                await stage.settle()
                assert list(stage.running) == ["C", "D"]


def unfinished(lines: list[Any]) -> list[type]:
    """The errors of the attempts that the pool could not finish, by its log."""
    return [type(line["exc_info"]) for line in lines if line["event"] == "the worker could not finish an attempt"]


@pytest.mark.parametrize(
    ("point", "by", "ran", "acked"),
    [
        ("after_hint", "a hint", False, {"A", "B"}),
        ("after_commit", "a hint", True, {"A", "B"}),
        ("after_commit", "a poll", True, {"B"}),
    ],
)
async def test_an_attempt_that_fails_on_its_way_is_logged_and_frees_its_slot(
    stages: Any, point: str, by: str, acked: set[str], *, ran: bool
) -> None:
    """An attempt that ends as it should is not logged."""
    async with stages(1) as stage:
        with structlog.testing.capture_logs() as lines:
            failpoints.arm(f"{point}:raise")
            await (stage.hint("A") if by == "a hint" else stage.poll(Polled([task("A")])))
            assert ("A" in stage.running) == ran
            if ran:
                await stage.end("A")
            assert stage.pool.busy == 0
            await stage.hint("B")
            await stage.end("B")
        assert stage.acked == acked
        assert unfinished(lines) == [failpoints.FailpointReached]


@pytest.mark.parametrize(
    ("of", "name", "error"),
    [("_runner", "run", RuntimeError), ("_claimer", "claim", asyncpg.InternalServerError)],
)
async def test_the_hint_of_an_unforeseen_error_keeps_no_place(
    stages: Any, monkeypatch: pytest.MonkeyPatch, of: str, name: str, error: type[Exception]
) -> None:
    """The broker delivers few unacknowledged hints, and none of these again before it closes the channel. The lease of
    a claim passes, and that writes a new hint. A poll finds a task that the claim has not taken.
    """

    async def fails(*_: object) -> None:
        raise error

    async with stages(1) as stage:
        monkeypatch.setattr(getattr(stage.pool, of), name, fails)
        monkeypatch.setattr(pools, "_FAILED_CLAIM_SECONDS", 0.0)
        with structlog.testing.capture_logs() as lines:
            await stage.hint("A")
        assert stage.acked == {"A"}
        assert unfinished(lines) == [error]


async def test_hints_whose_claims_fail_are_not_all_taken_and_acknowledged_at_once(
    stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While every claim fails, the hints that wait in the broker stay there for the time after it."""
    claims = 0

    async def fails(_delivery: Delivery) -> None:
        nonlocal claims
        claims += 1
        raise asyncpg.InsufficientPrivilegeError

    async with stages(1) as stage:
        monkeypatch.setattr(stage.pool._claimer, "claim", fails)
        monkeypatch.setattr(pools, "_FAILED_CLAIM_SECONDS", NEVER)
        await stage.hint("A")
        await stage.hint("B")
        assert (claims, stage.acked) == (1, set())


@pytest.mark.parametrize("by", ["the pool closes", "the claims close"])
async def test_the_hint_of_a_claim_that_is_cancelled_is_left_to_other_workers(
    stages: Any, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The broker delivers it again when the worker has closed its connection."""
    claiming = asyncio.Event()

    async def claim(_delivery: Delivery) -> None:
        if by == "the claims close":
            raise asyncio.CancelledError
        claiming.set()
        await asyncio.Event().wait()

    async with stages(1) as stage:
        monkeypatch.setattr(stage.pool._claimer, "claim", claim)
        await stage.hint("A")
        assert claiming.is_set() == (by == "the pool closes")
    assert stage.pool.busy == 0
    assert stage.acked == set()


async def test_a_pool_that_closes_cancels_what_runs_without_a_word(stages: Any) -> None:
    acking = asyncio.Event()
    ended: list[str] = []
    unforeseen: list[object] = []

    async def ack() -> None:
        acking.set()
        try:
            await asyncio.sleep(NEVER)
        finally:
            ended.append("ack")

    async with stages(1) as stage:
        await stage.hint("A")
        stage.held.add(await stage.hint("B", ack=ack))
        await stage.poll()
        assert acking.is_set()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: unforeseen.append(context.get("exception")))
        try:
            with structlog.testing.capture_logs() as lines:
                await stage.pool.close()
                assert (stage.running, stage.pool.busy, ended) == ({}, 0, ["ack"])
                assert stage.acked == set()  # the broker gives A to another worker
                await stage.settle()
        finally:
            loop.set_exception_handler(None)
        await stage.hint("C")
        assert stage.pool.waiting_hints("t") == 0
    assert unfinished(lines) == []
    assert not [error for error in unforeseen if isinstance(error, asyncio.CancelledError)]


# --- duplicates


async def test_a_duplicate_is_acknowledged_after_the_point_at_which_a_test_may_stop_the_worker(stages: Any) -> None:
    async with stages(1) as stage:
        await stage.hint("A")
        stage.held.add(await stage.hint("B"))
        failpoints.arm("after_hint:raise")
        await stage.poll()
        assert stage.acked == set()


async def test_the_acknowledgement_of_a_duplicate_leaves_nothing_in_memory(stages: Any) -> None:
    acks: list[weakref.ref[asyncio.Task[Any]]] = []

    async def ack() -> None:
        this = asyncio.current_task()
        assert this is not None
        acks.append(weakref.ref(this))

    async with stages(1) as stage:
        await stage.hint("A")
        stage.held.add(await stage.hint("B", ack=ack))
        await stage.poll()
        gc.collect()
        assert [one() for one in acks] == [None]


# --- the consumer


@pytest.mark.parametrize(
    ("finds", "rebuilt"),
    [("a new task", 1), ("a retry", 0), ("nothing", 0), ("a new task, and the broker is away meanwhile", 0)],
)
async def test_a_consumer_is_rebuilt_only_for_a_new_task_whose_hint_a_connected_broker_owes(
    stages: Any, finds: str, rebuilt: int
) -> None:
    async with stages(4) as stage:
        tasks = {"a retry": [task("A", was="retry")], "nothing": []}.get(finds, [task("A")])

        def find() -> Polled:
            stage.now += 1.0
            stage.broker.connected = "away" not in finds
            return Polled(tasks)

        await stage.hint("hinted")  # and its attempt ends: the pool holds no hint any more
        await stage.end("hinted")
        await stage.poll(Polled([task("B", was="retry"), task("C", was="retry")]), find)  # the second is a regular poll
        assert stage.rebuilt == rebuilt


async def test_a_consumer_is_not_rebuilt_for_what_a_requested_poll_finds(stages: Any) -> None:
    """It does not leave new tasks to their hints, so their hints may be on their way."""
    async with stages(1) as stage:
        stage.now += 1.0
        await stage.poll(Polled([task("A")]))
        assert (list(stage.running), stage.rebuilt) == (["A"], 0)
