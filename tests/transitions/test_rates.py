"""The rates that all processes share: the last request that is allowed, the first that is not, and whose they are."""

from __future__ import annotations

import pytest

from leasehold.limits import rates
from tests.factories import Rows


async def owes(rows: Rows, key: str, seconds: float) -> None:
    """The key's debt is that large now."""
    await rows.connection.execute(
        "UPDATE rate_bucket SET full_at = clock_timestamp() + make_interval(secs => $2) WHERE key = $1", key, seconds
    )


async def test_a_whole_minutes_requests_may_come_at_once_and_not_one_more(rows: Rows) -> None:
    taken = [await rates.take(rows.connection, "k", 60) for _ in range(60)]
    assert all(quota.allowed for quota in taken)
    assert (taken[0].remaining, taken[0].limit) == (59, 60)
    refused = await rates.take(rows.connection, "k", 2)
    assert not refused.allowed
    assert refused.remaining == 0
    assert (await rates.take(rows.connection, "other", 60)).allowed


@pytest.mark.parametrize(("debt", "allowed"), [(0.0, True), (30.0, True), (45.0, False), (60.0, False)])
async def test_a_request_is_allowed_while_its_own_debt_has_room(rows: Rows, debt: float, allowed: bool) -> None:
    """Two a minute: each owes thirty seconds, and sixty may be owed."""
    await rates.take(rows.connection, "k", 2)
    await owes(rows, "k", debt)
    seen = await rates.peek(rows.connection, "k", 2)
    quota = await rates.take(rows.connection, "k", 2)
    assert (seen.allowed, quota.allowed) == (allowed, allowed)
    if not allowed:
        assert quota.wait_seconds <= debt + 30.0 - 60.0
        assert quota.wait_seconds > 0.0


async def test_who_is_refused_is_told_how_long_the_same_charge_will_be_refused(rows: Rows) -> None:
    """Sixty a minute: thirty requests owe thirty seconds, of which there is room for ten."""
    await rates.take(rows.connection, "k", 60)
    await owes(rows, "k", 50.0)
    refused = await rates.take(rows.connection, "k", 60, 30)
    assert 1.0 < refused.wait_seconds <= 20.0  # it falls with the clock


@pytest.mark.parametrize("count", [1, 2])
async def test_a_clock_that_steps_back_makes_nobody_wait_for_the_length_of_the_step(rows: Rows, count: int) -> None:
    """No debt exceeds a minute. One that does is older than the step: it becomes the largest, and the next request is
    allowed, whose transaction writes that.
    """
    await rates.take(rows.connection, "k", 2)
    await owes(rows, "k", 3600.0)
    seen = await rates.peek(rows.connection, "k", 2)
    assert (seen.allowed, seen.remaining) == (True, 1)
    taken = await rates.take(rows.connection, "k", 2, count)
    assert (taken.allowed, taken.remaining) == (True, 0)
    for quota in (await rates.peek(rows.connection, "k", 2), await rates.take(rows.connection, "k", 2)):
        assert not quota.allowed
        assert quota.wait_seconds <= 30.0
    await owes(rows, "k", 30.0)
    assert (await rates.take(rows.connection, "k", 2)).allowed


async def test_several_are_charged_together_or_not_at_all(rows: Rows) -> None:
    await rates.take(rows.connection, "k", 4, 2)
    assert not (await rates.take(rows.connection, "k", 4, 3)).allowed
    assert (await rates.take(rows.connection, "k", 4, 2)).allowed  # the refused ones owe nothing
    assert not (await rates.take(rows.connection, "k", 4)).allowed


async def test_what_is_refunded_may_be_taken_again_by_its_key_alone(rows: Rows) -> None:
    for key in ("k", "other"):
        await rates.take(rows.connection, key, 4, 4)
    await rates.refund(rows.connection, "k", 4, 1)
    assert not (await rates.take(rows.connection, "other", 4)).allowed
    assert (await rates.take(rows.connection, "k", 4)).allowed
    assert not (await rates.take(rows.connection, "k", 4)).allowed


async def test_to_look_charges_nothing(rows: Rows) -> None:
    for _ in range(5):
        assert (await rates.peek(rows.connection, "k", 2)).remaining == 2
    await rates.take(rows.connection, "k", 2)
    for _ in range(5):
        assert (await rates.peek(rows.connection, "k", 2)).allowed


async def test_only_a_key_without_debt_is_forgotten(rows: Rows) -> None:
    for key in ("owes", "paid"):
        await rates.take(rows.connection, key, 2)
    await owes(rows, "paid", -1.0)
    await rates.forget_rates(rows.connection)
    assert [row["key"] for row in await rows.connection.fetch("SELECT key FROM rate_bucket")] == ["owes"]
