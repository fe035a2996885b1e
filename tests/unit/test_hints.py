"""The hints in hand: whose turn it is, and that one which may not run keeps no other waiting."""

from __future__ import annotations

from leasehold.broker.base import Delivery, Hint
from leasehold.domain.ids import new_id
from leasehold.worker.claiming.hints import Hints
from leasehold.worker.claiming.shares import Shares


async def no_ack() -> None: ...


def put(hints: Hints, *tenants: str) -> None:
    for tenant in tenants:
        hints.add(Delivery(Hint(new_id(), "q", tenant=tenant), no_ack))


def take_all(hints: Hints, shares: Shares) -> list[str]:
    taken = []
    while (delivery := hints.take()) is not None:
        taken.append(delivery.hint.tenant)
        shares.take(delivery.hint.tenant)
    return taken


def test_tenants_take_turns() -> None:
    shares = Shares(100)
    hints = Hints(shares)
    put(hints, "a", "a", "a", "b", "c", "b")
    assert take_all(hints, shares) == ["a", "b", "c", "a", "b", "a"]
    assert not hints


def test_two_tenants_take_turns_also_if_each_step_ends_before_the_next_begins() -> None:
    hints = Hints(Shares(100))
    put(hints, "a", "a", "b", "b")
    assert [delivery.hint.tenant for _ in range(4) if (delivery := hints.take())] == ["a", "b", "a", "b"]


def test_whoever_runs_least_is_first() -> None:
    shares = Shares(3)
    for _ in range(2):
        shares.take("a")
    hints = Hints(shares)
    put(hints, "a", "a", "b")
    assert take_all(hints, shares) == ["b"]
    assert hints  # they wait for a slot


def test_a_hint_that_may_not_run_waits_and_those_behind_it_go_on() -> None:
    shares = Shares(8, 8)
    hints = Hints(shares)
    put(hints, *["flood"] * 20, "newcomer")
    assert take_all(hints, shares) == ["flood", "newcomer", *["flood"] * 6]
    shares.release("flood")
    assert take_all(hints, shares) == ["flood"]


def test_beyond_a_hundred_tenants_that_may_not_a_newcomer_is_found() -> None:
    shares = Shares(100, 100)
    hints = Hints(shares)
    floods = [f"flood-{number}" for number in range(100)]
    put(hints, *floods, *floods, "newcomer")
    assert "newcomer" in take_all(hints, shares)


def test_a_slot_is_given_up_for_who_has_two_less() -> None:
    shares = Shares(2)
    hints = Hints(shares)
    shares.take("a")
    put(hints, "b")
    assert not hints.lighter_tenant_waits("a")  # else the two would change places for ever
    shares.take("a")
    assert hints.lighter_tenant_waits("a")
    assert not hints.lighter_tenant_waits("b")


def test_hints_that_are_unwanted_are_given_back_once_and_the_others_keep_their_turn() -> None:
    hints = Hints(Shares(100))
    put(hints, "a", "b", "a")
    first = hints.take()
    assert first is not None
    gone = {first.hint.task_id}
    hints.add(first)
    put(hints, "c")
    assert [delivery.hint.task_id for delivery in hints.remove(gone.__contains__)] == [first.hint.task_id]
    assert hints.remove(gone.__contains__) == []
    assert [hints.count(tenant) for tenant in "abc"] == [1, 1, 1]
    assert [delivery.hint.tenant for delivery in hints.remove(lambda _task_id: True)] == ["b", "a", "c"]
    assert not hints
    assert hints.take() is None


def test_a_pool_that_forgets_its_hints_has_none() -> None:
    hints = Hints(Shares(100))
    put(hints, "a", "b")
    hints.clear()
    assert not hints
    assert hints.take() is None


def test_a_tenant_s_own_hints_do_not_hide_who_has_two_less() -> None:
    shares = Shares(2)
    hints = Hints(shares)
    shares.take("a")
    shares.take("a")
    put(hints, "a")
    assert not hints.lighter_tenant_waits("a")
    put(hints, "b")
    assert hints.lighter_tenant_waits("a")
