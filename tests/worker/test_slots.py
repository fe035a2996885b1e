"""A slot pool of one slot: what reaches it while it looks into the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from leasehold.broker import make_broker
from leasehold.broker.base import Delivery, Hint
from leasehold.broker.outbox import Announcement
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.transitions.claims import Claimed, Polled
from leasehold.worker.attempts.slot import Slot
from leasehold.worker.claiming import slot_pool as pools
from leasehold.worker.claiming.claimer import Claimer
from leasehold.worker.claiming.hint_router import HintRouter
from leasehold.worker.claiming.shares import Rooms
from leasehold.worker.claiming.slot_pool import SlotPool
from leasehold.worker.claiming.slot_pools import SlotPools

SECONDS = 60.0
NEVER = 3600.0


def slot_pool_of(
    claim: Any, claim_due: Any, run: Any, *, slots: int = 1, broker: Any = None, poll_seconds: float = NEVER
) -> SlotPool:
    """Of one slot, without a broker; it looks when it is told to."""
    return SlotPool(
        ["q"],
        slots,
        reserve=0,
        claimer=claimer_of(claim, claim_due),
        runner=runner_of(run),
        broker=broker or make_broker(Settings(_env_file=None, broker="postgres")),
        poll_seconds=poll_seconds,
    )


def broker_with_hints(**changed: Any) -> Any:
    """A broker that is connected, and has just delivered a hint."""
    return SimpleNamespace(**{"delivers_hints": True, "connected": True, "last_delivery_at": monotonic()} | changed)


def claimer_of(claim: Any, poll: Any) -> Any:
    return SimpleNamespace(claim=claim, poll=poll, holds=lambda _task: False, holds_for_certain=lambda _task: False)


def runner_of(run: Any) -> Any:
    return SimpleNamespace(run=run)


async def test_a_hint_that_comes_during_a_look_that_finds_nothing_is_followed_at_once() -> None:
    looking, look_on, followed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def claim(_delivery: Delivery) -> Claimed | None:
        return None  # somebody else has done it: the hint is spent

    async def claim_due(_queues: Sequence[str], _limit: int, _overdue: float, _rooms: object) -> Polled:
        looking.set()
        await look_on.wait()
        return Polled([])

    async def run(_claimed: Claimed, _headers: object, _slot: object) -> None:
        raise AssertionError("nothing was claimed")

    async def ack() -> None:
        followed.set()

    slot_pool = slot_pool_of(claim, claim_due, run)
    slot_pool.start()
    try:
        await asyncio.wait_for(looking.wait(), SECONDS)
        slot_pool.deliver(Delivery(Hint(new_id(), "q"), ack))
        await asyncio.sleep(0)  # the slot pool sees it, and that its slot is promised to the look
        await asyncio.sleep(0)
        look_on.set()
        await asyncio.wait_for(followed.wait(), SECONDS)
    finally:
        await slot_pool.close()


async def test_a_task_that_the_sweeper_freed_during_the_first_claim_is_claimed_by_its_redelivered_hint() -> None:
    """A claim that waited for the sweeper's lock still sees the lease that it ended, and afterwards has no owner."""
    asked: list[tuple[UUID, ...]] = []
    given = object()

    async def claim(_task: UUID, gone: tuple[UUID, ...] = ()) -> Any:
        asked.append(gone)
        return given if len(asked) > 1 else None

    class OfNobody(Claimer):
        async def _dead_owner(self, task_id: UUID) -> None:
            return None

    batcher: Any = SimpleNamespace(claim=claim)
    nothing: Any = None
    claimer = OfNobody(nothing, batcher, nothing, nothing, max_claims=1, takes_over=True)
    delivery = Delivery(Hint(new_id(), "q"), no_ack, redelivered=True)
    assert await claimer.claim(delivery) is given
    assert asked == [(), ()]


def claimed(step: str) -> Claimed:
    lease = Lease(new_id(), new_id(), 1, 1, monotonic() + 60.0)
    return Claimed(
        lease, new_id(), "t", "p", 1, step, "q", 1, 0, 0, "pending", 0.0, {}, {}, "jobs/x", None, None, None, False, 30,
        cancelling=False,
    )  # fmt: skip


async def test_a_job_of_many_steps_gives_its_slot_up_between_two_when_others_wait() -> None:
    """One that went on for ever would keep everybody else waiting."""
    other_ran, steps = asyncio.Event(), 0
    waiting = [claimed("endless"), claimed("other")]

    async def claim(_delivery: Delivery) -> Claimed | None:
        raise AssertionError("there are no hints")

    async def claim_due(_queues: Sequence[str], limit: int, _overdue: float, _rooms: object) -> Polled:
        found, waiting[:] = waiting[:limit], waiting[limit:]
        return Polled(found)

    async def run(one: Claimed, _headers: object, slot: Slot) -> Claimed | None:
        nonlocal steps
        if one.step == "other":
            other_ran.set()
            return None
        steps += 1
        await asyncio.sleep(0.01)
        return claimed("endless") if slot.may_continue() else None

    slot_pool = slot_pool_of(claim, claim_due, run)
    slot_pool.start()
    try:
        await asyncio.wait_for(other_ran.wait(), SECONDS)
        assert steps > 1  # it went on while nobody's turn had come
    finally:
        await slot_pool.close()


@pytest.mark.parametrize("arrives", ["before the answer of the poll", "after it"])
async def test_a_hint_of_the_task_that_a_poll_has_claimed_is_acknowledged_and_interrupts_no_job(
    arrives: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool is full for several polls: if the hint waited for a slot, the job would lose its slot after the step."""
    task, acked, looks = claimed("first"), asyncio.Event(), 0
    looked_often, ended = asyncio.Event(), asyncio.Event()
    may_continue = None

    async def ack() -> None:
        acked.set()

    async def claim(_delivery: Delivery) -> Claimed | None:
        raise AssertionError("the hint needs no claim")

    async def claim_due(_queues: Sequence[str], _limit: int, _overdue: float, _rooms: object) -> Polled:
        if arrives == "before the answer of the poll":
            slot_pool.deliver(Delivery(Hint(task.lease.task_id, "q"), ack))
        return Polled([task])

    async def run(_started: Claimed, _headers: object, slot: Slot) -> None:
        nonlocal may_continue
        held.add(task.lease.task_id)
        if arrives == "after it":
            slot_pool.deliver(Delivery(Hint(task.lease.task_id, "q"), ack))
        await looked_often.wait()
        may_continue = slot.may_continue()
        slot_pool.stop_claiming()
        ended.set()

    held: set[UUID] = set()
    claimer: Any = SimpleNamespace(claim=claim, poll=claim_due, holds_for_certain=held.__contains__)
    slot_pool = SlotPool(
        ["q"], 1, reserve=0, claimer=claimer, runner=runner_of(run), broker=broker_with_hints(), poll_seconds=NEVER
    )
    monkeypatch.setattr(pools, "_FAIR_SECONDS", 0.01)
    keep_turn = slot_pool._keep_slot_if_others_wait

    def counting(*, others_wait: bool) -> None:
        nonlocal looks
        keep_turn(others_wait=others_wait)
        looks += 1
        if looks == 4:
            looked_often.set()

    monkeypatch.setattr(slot_pool, "_keep_slot_if_others_wait", counting)
    slot_pool.start()
    try:
        await asyncio.wait_for(ended.wait(), SECONDS)
        assert may_continue
        await asyncio.wait_for(acked.wait(), SECONDS)
    finally:
        await slot_pool.close()


@pytest.mark.parametrize(
    ("holds", "confirmed", "certain"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_hint_counts_as_a_duplicate_only_while_the_ownership_is_confirmed(
    *, holds: bool, confirmed: bool, certain: bool
) -> None:
    """A task that is being settled may be due again, and then its hint is news."""
    heartbeat: Any = SimpleNamespace(holds=lambda _task: holds, ownership_confirmed=lambda _task: confirmed)
    nothing: Any = None
    claimer = Claimer(nothing, nothing, heartbeat, nothing, max_claims=1, takes_over=True)
    assert claimer.holds_for_certain(new_id()) is certain


async def test_a_full_pool_keeps_the_hints_that_are_no_duplicates() -> None:
    duplicate, other, acked = new_id(), new_id(), asyncio.Event()

    async def ack() -> None:
        acked.set()

    async def never(*_arguments: object) -> Any:
        raise AssertionError("no slot is free")

    slot_pool = slot_pool_of(never, never, never)
    slot_pool._claimer.holds_for_certain = lambda task_id: task_id == duplicate  # type: ignore[method-assign]
    for task in (other, duplicate):
        slot_pool.deliver(Delivery(Hint(task, "q"), ack if task == duplicate else no_ack))
    slot_pool._acknowledge_duplicates()
    await asyncio.wait_for(acked.wait(), SECONDS)
    left = slot_pool._hints.take()
    assert left is not None
    assert left.hint.task_id == other
    assert slot_pool._hints.take() is None
    await slot_pool.close()


def test_the_hints_of_one_tenant_s_steps_do_not_fill_the_memory() -> None:
    """Its workflows may start any number of steps while no slot is free. The hints of the broker have a bound there,
    and are kept until they are acknowledged.
    """

    async def never(*_arguments: object) -> Any:
        raise AssertionError("no slot is free")

    announced: list[Announcement] = []
    announcer: Any = SimpleNamespace(announce=announced.extend)
    router, slot_pool = HintRouter(announcer), slot_pool_of(never, never, never)
    router.add(slot_pool)
    for tenant, count in (("flood", 900), ("flood", 900), ("other", 1)):
        router.announce([Announcement(1, Hint(new_id(), "q", tenant=tenant)) for _ in range(count)])
    assert len(announced) == 1801
    assert (slot_pool.waiting_hints("flood"), slot_pool.waiting_hints("other")) == (1000, 1)
    router.deliver(Delivery(Hint(new_id(), "q", tenant="flood"), no_ack))
    assert slot_pool.waiting_hints("flood") == 1001


async def test_a_poll_that_is_under_way_when_a_pool_stops_loses_no_task() -> None:
    """A poll that is cancelled may have claimed: its tasks would wait for their leases to pass, and lose an attempt."""
    polling, go_on = asyncio.Event(), asyncio.Event()
    task, ran = claimed("only"), []

    async def claim(_delivery: Delivery) -> Claimed | None:
        raise AssertionError("there are no hints")

    async def claim_due(_queues: Sequence[str], _limit: int, _overdue: float, _rooms: object) -> Polled:
        polling.set()
        await go_on.wait()
        return Polled([task])

    async def run(started: Claimed, _headers: object, _slot: object) -> None:
        ran.append(started)

    slot_pool = slot_pool_of(claim, claim_due, run)
    slot_pool.start()
    try:
        await asyncio.wait_for(polling.wait(), SECONDS)
        slot_pool.stop_claiming()
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        async with asyncio.timeout(SECONDS):
            await slot_pool.finished()
        assert ran == [task]
    finally:
        await slot_pool.close()


async def test_the_slot_pools_of_a_worker_stop_together() -> None:
    """A pool may wait for its handlers. Meanwhile no other pool claims tasks."""
    both_stop = asyncio.Barrier(2)
    nothing: Any = None
    slot_pools = SlotPools(nothing, nothing, nothing, nothing, nothing, nothing)
    closing: Any = SimpleNamespace(close=both_stop.wait)
    slot_pools._pools = [closing, closing]
    await asyncio.wait_for(slot_pools.close(), SECONDS)


@pytest.mark.parametrize("turns", range(5))
async def test_a_slot_pool_ends_though_it_is_asked_to_poll_at_that_very_moment(turns: int) -> None:
    """Before Python 3.12 `asyncio.wait_for` loses a cancellation that comes with what it waits for."""
    looked = asyncio.Event()

    async def claim(_delivery: Delivery) -> Claimed | None:
        raise AssertionError("there are no hints")

    async def claim_due(_queues: Sequence[str], _limit: int, _overdue: float, _rooms: object) -> Polled:
        looked.set()
        return Polled([])

    async def run(_claimed: Claimed, _headers: object, _slot: object) -> None:
        raise AssertionError("nothing was claimed")

    slot_pool = slot_pool_of(claim, claim_due, run)
    slot_pool.start()
    await asyncio.wait_for(looked.wait(), SECONDS)
    for _ in range(5):  # it waits now
        await asyncio.sleep(0)
    slot_pool.poll_soon()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(SECONDS):
        await slot_pool.close()


@pytest.mark.parametrize("crowded", [True, False])
async def test_a_crowded_pool_polls_for_a_newcomer_s_task_before_its_hint_is_overdue(*, crowded: bool) -> None:
    """The hint may stand behind a flood's in the broker; where nothing crowds the pool, it is on its way."""
    asked: list[float | None] = []
    polled = asyncio.Event()

    async def claim(_delivery: Delivery) -> Claimed | None:
        await asyncio.sleep(NEVER)
        return None

    async def claim_due(_queues: Sequence[str], _limit: int, _overdue: float, rooms: Rooms) -> Polled:
        asked.append(rooms.others_overdue)
        polled.set()
        return Polled([])

    async def run(_claimed: Claimed, _headers: object, _slot: object) -> None:
        raise AssertionError("nothing was claimed")

    slot_pool = SlotPool(
        ["q"],
        4,
        reserve=4,
        claimer=claimer_of(claim, claim_due),
        runner=runner_of(run),
        broker=make_broker(Settings(_env_file=None, broker="postgres")),
        poll_seconds=1.0,
    )
    slot_pool.start()
    try:
        await asyncio.wait_for(polled.wait(), SECONDS)
        for _ in range(4 if crowded else 0):
            slot_pool.deliver(Delivery(Hint(new_id(), "q", tenant="flood"), no_ack))
        await asyncio.sleep(0)
        polled.clear()
        slot_pool.poll_soon()
        await asyncio.wait_for(polled.wait(), SECONDS)
    finally:
        await slot_pool.close()
    assert asked[0] is None
    assert (asked[-1] is not None and asked[-1] < 0.25) == crowded


@pytest.mark.parametrize("newcomer_waits", [True, False])
async def test_a_full_pool_in_which_no_hint_waits_gives_a_newcomer_a_slot_before_the_flood_ends(
    monkeypatch: pytest.MonkeyPatch, *, newcomer_waits: bool
) -> None:
    """The slot runs a hint of the flood, and this one fills the broker's window: the next hint comes with its ACK, and
    no poll ever finds a slot that is free. The newcomer's hint stands behind the flood's.
    """
    ran: list[str] = []
    continued: list[bool] = []
    waiting = [replace(claimed("newcomer"), tenant_id="newcomer")] if newcomer_waits else []
    ended, flood = asyncio.Event(), 30

    async def claim(_delivery: Delivery) -> Claimed | None:
        return claimed("flood")

    async def claim_due(_queues: Sequence[str], limit: int, _overdue: float, _rooms: object) -> Polled:
        if not ran:
            return Polled([])  # the newcomer comes later
        found, waiting[:] = waiting[:limit], waiting[limit:]
        return Polled(found)

    async def run(one: Claimed, _headers: object, slot: Slot) -> None:
        await asyncio.sleep(0.02)
        ran.append(one.step)
        continued.append(slot.may_continue())

    async def ack() -> None:
        if len(ran) < flood:
            slot_pool.deliver(Delivery(Hint(new_id(), "q", tenant="flood"), ack))
        else:
            ended.set()

    slot_pool = slot_pool_of(claim, claim_due, run, broker=broker_with_hints())
    monkeypatch.setattr(pools, "_FAIR_SECONDS", 0.01)
    slot_pool.start()
    slot_pool.deliver(Delivery(Hint(new_id(), "q", tenant="flood"), ack))
    try:
        await asyncio.wait_for(ended.wait(), SECONDS)
    finally:
        await slot_pool.close()
    if newcomer_waits:
        assert "newcomer" in ran[:12]
    else:
        assert ran == ["flood"] * len(ran)
        assert all(continued)  # nobody is known to wait: a job of many steps keeps its slot


@pytest.mark.parametrize(
    ("silence", "last", "held", "rebuilds"),
    [
        (0.0, "never", "nothing", 1),
        (0.0, "long ago", "nothing", 1),
        (0.0, "now", "nothing", 0),
        (NEVER, "never", "nothing", 0),  # it has just started: the first hint is on its way
        (0.0, "long ago", "a hint that waits", 0),
        (0.0, "long ago", "a hint whose attempt runs", 0),
    ],
)
async def test_a_consumer_is_rebuilt_if_polls_find_new_work_and_the_silence_has_no_other_cause(
    monkeypatch: pytest.MonkeyPatch, silence: float, last: str, held: str, rebuilds: int
) -> None:
    rebuilt, ran, found = 0, asyncio.Event(), [claimed("overdue")]
    followed = asyncio.Event()
    at = {"never": None, "long ago": 1.0, "now": monotonic() + NEVER}[last]

    def rebuild() -> None:
        nonlocal rebuilt
        rebuilt += 1

    async def claim(_delivery: Delivery) -> Claimed | None:
        followed.set()
        return claimed("hinted")

    async def claim_due(_queues: Sequence[str], limit: int, _overdue: float, _rooms: object) -> Polled:
        if held == "a hint that waits":
            slot_pool.deliver(Delivery(Hint(new_id(), "q"), no_ack))
        if held == "a hint whose attempt runs":
            await followed.wait()
        return Polled(found[:1])

    async def run(one: Claimed, _headers: object, _slot: Slot) -> None:
        if one.step == "overdue":
            found.clear()
            ran.set()
        await asyncio.sleep(NEVER)

    broker = broker_with_hints(last_delivery_at=at, rebuild_consumer=rebuild)
    slot_pool = slot_pool_of(claim, claim_due, run, slots=2, broker=broker, poll_seconds=0.01)
    monkeypatch.setattr(pools, "_SILENCE_SECONDS", silence)
    if held == "a hint whose attempt runs":
        slot_pool.deliver(Delivery(Hint(new_id(), "q"), no_ack))
    slot_pool.start()
    try:
        await asyncio.wait_for(ran.wait(), SECONDS)
        assert rebuilt == rebuilds
    finally:
        await slot_pool.close()


async def test_a_rebuilt_consumer_has_time_for_its_first_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    rebuilt, polls, polled = 0, 0, asyncio.Event()

    def rebuild() -> None:
        nonlocal rebuilt
        rebuilt += 1
        monkeypatch.setattr(pools, "_SILENCE_SECONDS", NEVER)

    async def claim_due(_queues: Sequence[str], _limit: int, _overdue: float, _rooms: object) -> Polled:
        nonlocal polls
        polls += 1
        if polls == 5:
            polled.set()
        return Polled([claimed("overdue")])

    async def run(_one: Claimed, _headers: object, _slot: Slot) -> None:
        return None

    broker = broker_with_hints(last_delivery_at=None, rebuild_consumer=rebuild)
    slot_pool = slot_pool_of(None, claim_due, run, slots=2, broker=broker, poll_seconds=0.01)
    monkeypatch.setattr(pools, "_SILENCE_SECONDS", 0.0)
    slot_pool.start()
    try:
        await asyncio.wait_for(polled.wait(), SECONDS)
        assert rebuilt == 1
    finally:
        await slot_pool.close()


async def no_ack() -> None: ...


@dataclass
class Sleepers:
    """A pool of `slots` whose broker delivers hints. Its first poll claims `count` tasks; others are held back."""

    was: str
    slots: int
    count: int
    polls: int = 0
    running: int = 0
    ends: list[asyncio.Event] = field(default_factory=list)

    @asynccontextmanager
    async def polling(self) -> AsyncIterator[None]:
        pool = slot_pool_of(None, self._poll, self._run, slots=self.slots, broker=broker_with_hints())
        pool.start()
        try:
            await self.until(1)
            yield
        finally:
            await pool.close()

    async def until(self, polls: int) -> None:
        async with asyncio.timeout(SECONDS):
            while self.polls < polls:
                await asyncio.sleep(0)

    async def idle(self) -> None:
        """Let everything go on that can."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def _poll(self, *_arguments: Any) -> Polled:
        self.polls += 1
        tasks = [replace(claimed("x"), previous_state=self.was) for _ in range(self.count if self.polls == 1 else 0)]
        return Polled(tasks, held_back=self.polls == 1 or self.running > 0)

    async def _run(self, *_arguments: Any) -> None:
        self.ends.append(asyncio.Event())
        self.running += 1
        await self.ends[-1].wait()
        self.running -= 1


@pytest.mark.parametrize(("was", "polls"), [("waiting", 3), ("retry", 3), ("pending", 1)])
async def test_what_no_hint_announces_is_polled_when_an_attempt_ends(
    monkeypatch: pytest.MonkeyPatch, was: str, polls: int
) -> None:
    """A tenant has more sleepers than room: an attempt that ends makes room for the next. Hints come by themselves."""
    monkeypatch.setattr(pools, "_FAIR_SECONDS", NEVER)
    sleepers = Sleepers(was, slots=4, count=2)
    async with sleepers.polling():
        await sleepers.idle()
        assert sleepers.polls == 1
        for number in (0, 1):
            sleepers.ends[number].set()
            await sleepers.idle()
        assert sleepers.polls == polls


async def test_attempts_that_end_together_share_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_FAIR_SECONDS", NEVER)
    monkeypatch.setattr(pools, "_ENDS_SECONDS", NEVER)
    sleepers = Sleepers("waiting", slots=16, count=8)
    async with sleepers.polling():
        await sleepers.idle()
        for number, polls in ((0, 1), (1, 1), (2, 2)):
            sleepers.ends[number].set()
            await sleepers.idle()
            assert sleepers.polls == polls, number
        monkeypatch.setattr(pools, "_ENDS_SECONDS", 0.001)
        for number, polls in ((3, 3), (4, 4)):
            sleepers.ends[number].set()
            await sleepers.until(polls)


async def test_attempts_that_one_settlement_ended_are_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that polls would claim only when all that it runs has ended."""
    monkeypatch.setattr(pools, "_FAIR_SECONDS", NEVER)
    monkeypatch.setattr(pools, "_ENDS_SECONDS", NEVER)
    sleepers = Sleepers("waiting", slots=16, count=8)
    async with sleepers.polling():
        await sleepers.idle()
        for end in sleepers.ends[:3]:
            end.set()
        await sleepers.idle()
        assert sleepers.polls == 2


async def test_attempts_that_only_wait_lend_no_more_slots_than_a_tenant_may_have() -> None:
    """And an attempt that has two calls that wait lends its slot once."""
    more, ran = [claimed("first"), claimed("second"), claimed("third")], asyncio.Event()
    go_on = asyncio.Event()
    running: list[str] = []

    async def claim(_delivery: Delivery) -> Claimed | None:
        raise AssertionError("no hint came")

    async def claim_due(_queues: Sequence[str], limit: int, _overdue: float, _rooms: object) -> Polled:
        assert limit == 1
        return Polled([more.pop(0)] if more else [])

    async def run(one: Claimed, _headers: object, slot: Slot) -> None:
        running.append(one.step)
        with slot.lent(), slot.lent():
            if len(running) == 2:
                ran.set()
            await go_on.wait()
        slot_pool.poll_soon()

    slot_pool = slot_pool_of(claim, claim_due, run)
    slot_pool.start()
    try:
        await asyncio.wait_for(ran.wait(), SECONDS)
        slot_pool.poll_soon()
        for _ in range(100):
            await asyncio.sleep(0)
        assert running == ["first", "second"]
        go_on.set()
        async with asyncio.timeout(SECONDS):
            while running != ["first", "second", "third"] or slot_pool.busy:
                await asyncio.sleep(0.001)
    finally:
        await slot_pool.close()


@pytest.mark.parametrize("lends", [True, False])
def test_an_attempt_lends_its_slot_from_its_first_waiting_call_until_none_waits(*, lends: bool) -> None:
    acts: list[str] = []

    def lend(tenant: str) -> bool:
        acts.append(f"lend {tenant}")
        return lends

    pool: Any = SimpleNamespace(lend=lend, take_back=lambda tenant: acts.append(f"take back {tenant}"))
    slot = pools._Slot(pool, "acme")
    for turn in (1, 2):
        first, second = slot.lent(), slot.lent()
        with first:
            assert acts.count("lend acme") == turn
            second.__enter__()
            assert acts.count("lend acme") == turn
        assert acts.count("take back acme") == (turn - 1 if lends else 0)
        second.__exit__(None, None, None)
        assert acts.count("take back acme") == (turn if lends else 0)


@pytest.mark.parametrize("ends", ["up", "passed", "stopped"])
@pytest.mark.parametrize("hinted", [False, True])
async def test_a_slot_whose_attempt_found_no_child_takes_no_other_task_for_a_while(
    monkeypatch: pytest.MonkeyPatch, ends: str, *, hinted: bool
) -> None:
    """Else a worker that can make no child takes one task after another, and other workers find none."""
    now = monotonic()
    monkeypatch.setattr(pools, "monotonic", lambda: now)
    monkeypatch.setattr(pools, "_REST_CHECK_SECONDS", 0.001)
    waiting = [claimed("first"), claimed("second")]
    is_down, checked, ack = True, 0, AsyncMock()
    ran: list[str] = []

    def down() -> bool:
        nonlocal checked
        checked += 1
        return is_down

    async def claim(_delivery: Delivery) -> Claimed | None:
        return waiting.pop(0)

    async def claim_due(_queues: Sequence[str], limit: int, _overdue: float, _rooms: object) -> Polled:
        found, waiting[:] = ([], waiting) if hinted else (waiting[:limit], waiting[limit:])
        return Polled(found)

    async def run(one: Claimed, _headers: object, slot: Slot) -> None:
        ran.append(one.step)
        if one.step == "first":
            slot.rest_while(down)

    slot_pool = slot_pool_of(claim, claim_due, run, poll_seconds=0.01)
    slot_pool.start()
    try:
        async with asyncio.timeout(SECONDS):
            for _ in range(2 * hinted):
                slot_pool.deliver(Delivery(Hint(new_id(), "q"), ack))
            while checked < 5:
                await asyncio.sleep(0.001)
            assert (ran, ack.await_count) == (["first"], hinted)
            if ends == "stopped":
                slot_pool.stop_claiming()
                await slot_pool.finished()
                return
            is_down = ends == "passed"
            now += 61 * is_down
            while len(ran) < 2:
                await asyncio.sleep(0.001)
    finally:
        await slot_pool.close()
