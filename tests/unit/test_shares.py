"""Who may take a slot: one tenant alone has nearly all, and whoever comes later always finds one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from leasehold.domain.concurrency_limit import GREED
from leasehold.worker.claiming.shares import Shares


def filled(shares: Shares, *tenants: str) -> Shares:
    """Each tenant in turn takes as many as it may."""
    for tenant in tenants:
        while shares.may_take(tenant):
            shares.take(tenant)
    return shares


def shared_by_two(at_most: int, reserve: int, over: int = 0) -> Iterator[Shares]:
    """Every way in which two tenants may share a pool. `over`: the steps that have taken a lent slot back."""
    for steps in product(range(at_most + over + 1), repeat=2):
        shares = Shares(at_most, reserve)
        if sum(steps) <= shares.slots + reserve + over:
            for tenant, running in zip(("first", "second"), steps, strict=True):
                for _ in range(running):
                    shares.take(tenant)
            yield shares


@pytest.mark.parametrize("at_most", [1, 2, 7, 8, 16, 100, 128, 4096])
def test_a_tenant_alone_has_all_that_one_may_have(at_most: int) -> None:
    shares = filled(Shares(at_most, at_most), "flood")
    assert shares.running("flood") == at_most
    assert shares.may_take("newcomer")


def test_a_tenant_that_comes_second_has_several() -> None:
    shares = filled(Shares(128, 128), "flood", "second")
    assert shares.running("second") > 10


@pytest.mark.parametrize("slots", [1, 2, 8, 128])
def test_as_many_tenants_as_there_are_slots_leave_one_for_the_next(slots: int) -> None:
    shares = filled(Shares(slots, slots), *(f"flood-{number}" for number in range(slots)))
    assert shares.may_take("newcomer")


def test_without_a_reserve_every_slot_is_taken() -> None:
    shares = filled(Shares(8), "flood")
    assert shares.busy == 8
    assert not shares.may_take("newcomer")


def test_the_reserve_is_for_those_who_run_nothing() -> None:
    shares = filled(Shares(2, 2), "flood", "other")
    assert (shares.running("flood"), shares.running("other")) == (2, 1)
    assert shares.may_take("third")
    assert not shares.may_take("other")
    shares.release("flood")
    assert not shares.may_take("flood")  # two run still, and two are for all
    shares.release("flood")
    assert shares.may_take("other")


def test_the_reserve_ends() -> None:
    assert not filled(Shares(1, 1), "flood", "other").may_take("third")


@pytest.mark.parametrize("running", [0, 1, 50, 127, 128])
def test_a_poll_may_claim_as_much_as_hints_might(running: int) -> None:
    shares = Shares(128, 128)
    for _ in range(running):
        shares.take("flood")
    room = shares.rooms(1000).by_tenant["flood"][1] if running else shares.rooms(1000).for_others
    assert room is not None
    assert filled(shares, "flood").running("flood") == running + room


def test_a_poll_with_nothing_but_the_reserve_is_for_those_who_run_nothing() -> None:
    shares = Shares(2, 2)
    for _ in range(2):
        shares.take("flood")
    rooms = shares.rooms(2)
    assert (rooms.by_tenant, rooms.for_others) == ({"flood": (2, 0)}, 1)


def test_a_poll_that_is_under_way_has_its_slots() -> None:
    shares = Shares(2, 1)
    shares.kept_for_poll = 2
    assert shares.may_take("newcomer")  # of the reserve
    shares.kept_for_poll = 3
    assert not shares.may_take("newcomer")


def test_a_poll_that_is_under_way_stops_nobody_who_has_room() -> None:
    shares = filled(Shares(128, 128), "flood")
    shares.release("flood")
    shares.kept_for_poll = shares.free - 1
    assert shares.may_take("flood")


@pytest.mark.parametrize("running", [0, 1, 50, 127, 128])
@pytest.mark.parametrize("limit", [1, 18, 64])
def test_hints_and_a_poll_at_once_give_no_tenant_more_than_its_share(running: int, limit: int) -> None:
    shares = Shares(128, 128)
    for _ in range(running):
        shares.take("flood")
    rooms = shares.begin_poll(limit)
    room = rooms.by_tenant["flood"][1] if running else rooms.for_others
    filled(shares, "flood")  # the hints that come while the poll runs
    shares.end_poll()
    for _ in range(limit if room is None else min(room, limit)):
        shares.take("flood")
    assert shares.running("flood") == 128
    assert (shares.kept_for_poll, shares.may_take("newcomer")) == (0, True)


def test_a_tenant_keeps_its_slot_only_while_it_might_take_it_again() -> None:
    shares = filled(Shares(16, 16), "flood")
    assert shares.may_keep("flood")
    filled(shares, "other", "third")
    assert not shares.may_keep("flood")
    assert shares.may_keep("third")
    while not shares.may_keep("flood"):
        shares.release("flood")
    assert shares.running("flood") - 1 < GREED * (shares.free + 1)
    assert shares.running("flood") > 1


@pytest.mark.parametrize(("at_most", "reserve", "over"), [(1, 1, 0), (2, 1, 0), (8, 8, 0), (16, 16, 0), (2, 0, 1)])
def test_a_tenant_keeps_a_slot_exactly_if_it_could_take_it_again(at_most: int, reserve: int, over: int) -> None:
    for shares in shared_by_two(at_most, reserve, over):
        before = shares.running("first"), shares.running("second")
        if before[0] > 0:
            keeps = shares.may_keep("first")
            shares.release("first")
            # the only step of a tenant keeps its slot also if a slot that was lent is back
            assert keeps == (shares.may_take("first") or before[0] == 1), before


@pytest.mark.parametrize(("at_most", "reserve"), [(1, 1), (2, 2), (8, 8), (9, 0)])
@pytest.mark.parametrize("tenant", ["first", "newcomer"])
def test_a_poll_has_room_for_exactly_as_many_tasks_as_hints_could_start(
    at_most: int, reserve: int, tenant: str
) -> None:
    for limit in range(1, 2 * at_most):
        for shares in shared_by_two(at_most, reserve):
            if shares.free <= 0 or (limit > shares.free and not reserve):
                continue  # a poll asks for no more than there is
            state = limit, shares.running("first"), shares.running("second")
            rooms = shares.rooms(limit)
            room = rooms.by_tenant[tenant][1] if tenant in rooms.by_tenant else rooms.for_others
            before = shares.running(tenant)
            started = filled(shares, tenant).running(tenant) - before
            assert room == (None if started >= limit else started), state


def test_a_slot_that_is_kept_is_no_room_for_a_tenant_that_runs_something() -> None:
    shares = Shares(2, 1)
    shares.take("flood")
    shares.kept_for_poll = 1
    rooms = shares.rooms(1)
    assert (rooms.by_tenant, rooms.for_others) == ({"flood": (1, 0)}, 1)


def test_a_poll_that_is_under_way_counts_only_the_tasks_that_it_has_room_for() -> None:
    """All slots but one are kept for the poll, but it may claim 24 tasks of the flood. With these it is not at 128."""
    shares = Shares(128, 128)
    for tenant, steps in (("flood", 90), ("other", 16)):
        for _ in range(steps):
            shares.take(tenant)
    rooms = shares.begin_poll(39)
    assert rooms.by_tenant["flood"] == (90, 24)
    assert shares.may_take("flood")
