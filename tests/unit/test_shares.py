"""Who may take a slot: one tenant alone has nearly all, and whoever comes later always finds one."""

from __future__ import annotations

import pytest

from leasehold.domain.concurrency_limit import GREED
from leasehold.worker.claiming.shares import Shares


def filled(shares: Shares, *tenants: str) -> Shares:
    """Each tenant in turn takes as many as it may."""
    for tenant in tenants:
        while shares.may_take(tenant):
            shares.take(tenant)
    return shares


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
    assert filled(Shares(8), "flood").busy == 8


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
