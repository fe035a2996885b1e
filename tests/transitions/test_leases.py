"""How long a lease lasts: PostgreSQL's end and the worker's, by every way to get one. No window lies between them in
which both a worker and its successor may write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from leasehold.transitions import claims, settlements, sweeps
from leasehold.transitions.claims import LeaseTerms
from leasehold.transitions.settlements import Completion
from tests.factories import THREE, Rows, assert_history, terms
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open

TTL, MARGIN = 33.0, 7.0
#: How long a statement takes, by the worker's clock.
ROUND_TRIP = 11.0


@dataclass
class SlowConnection:
    """The connection of a worker whose monotonic clock goes on while PostgreSQL answers."""

    rows: Rows
    now: float = 1000.0
    asked_at: float = 0.0

    async def fetch(self, *statement: Any) -> Any:
        self.asked_at = self.now
        answer = await self.rows.connection.fetch(*statement)
        self.now += ROUND_TRIP
        return answer


async def by_hint(rows: Rows, slow: Any, terms: LeaseTerms) -> claims.Claimed:
    (told,) = await rows.submit()
    (claimed,) = await claims.claim(slow, terms, [told.hint.task_id])
    return claimed


async def by_poll(rows: Rows, slow: Any, terms: LeaseTerms) -> claims.Claimed:
    await rows.submit()
    (claimed,) = await claims.claim_due(slow, terms, ["default"], 10)
    return claimed


async def by_takeover(rows: Rows, slow: Any, terms: LeaseTerms) -> claims.Claimed:
    lost = (await rows.leased()).lease
    await rows.lapse(lost.task_id)
    (claimed,) = await claims.claim(slow, terms, [lost.task_id])
    return claimed


async def by_completion(rows: Rows, slow: Any, terms: LeaseTerms) -> claims.Claimed:
    (told,) = await rows.submit(THREE)
    (first,) = await claims.claim(rows.connection, terms, [told.hint.task_id])
    settled = await settlements.complete(slow, [Completion(first.lease, claim_next=True)], terms)
    return settled.next_steps[first.lease.task_id]


async def by_repetition(rows: Rows, slow: Any, terms: LeaseTerms) -> claims.Claimed:
    """The completion's answer was lost: the worker asks for what it claimed with it."""
    (told,) = await rows.submit(THREE)
    (first,) = await claims.claim(rows.connection, terms, [told.hint.task_id])
    await settlements.complete(rows.connection, [Completion(first.lease, claim_next=True)], terms)
    return (await claims.claim_again(slow, [first.lease.task_id], {}, terms, []))[first.lease.task_id]


Way = Callable[[Rows, Any, LeaseTerms], Awaitable[claims.Claimed]]


@pytest.mark.parametrize("way", [by_hint, by_poll, by_takeover, by_completion, by_repetition])
async def test_a_worker_stops_trusting_a_lease_a_margin_before_it_passes(
    rows: Rows, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowConnection(rows)
    for module in ("claims.by_hint", "claims.by_poll", "settlements.completion"):
        monkeypatch.setattr(f"leasehold.transitions.{module}.monotonic", lambda: slow.now)
    terms = LeaseTerms(rows.terms.owner, TTL, MARGIN, 5)
    clock = "SELECT clock_timestamp()"
    before = await rows.connection.fetchval(clock)
    lease = (await way(rows, slow, terms)).lease
    after = await rows.connection.fetchval(clock)
    # The worker counts from before the question, PostgreSQL from some time after it.
    assert lease.trusted_until == slow.asked_at + TTL - MARGIN
    ends = (await rows.task(lease.task_id))["lease_until"]
    assert before + timedelta(seconds=TTL) <= ends <= after + timedelta(seconds=TTL)


async def test_a_renewal_lasts_as_long_as_it_was_asked_for_from_now(rows: Rows) -> None:
    lease = (await rows.leased()).lease
    before = await rows.connection.fetchval("SELECT clock_timestamp()")
    await claims.renew(rows.connection, rows.terms.owner, [lease], TTL)
    after = await rows.connection.fetchval("SELECT clock_timestamp()")
    ends = (await rows.task(lease.task_id))["lease_until"]
    assert before + timedelta(seconds=TTL) <= ends <= after + timedelta(seconds=TTL)


@pytest.mark.parametrize(("passed", "taken"), [(timedelta(seconds=-20), False), (timedelta(0), True)])
async def test_a_lease_is_taken_over_when_it_has_passed_and_not_before(
    rows: Rows, passed: timedelta, taken: bool
) -> None:
    lease = (await rows.leased()).lease
    await rows.connection.execute(
        "UPDATE task SET lease_until = clock_timestamp() - $2::interval WHERE id = $1", lease.task_id, passed
    )
    found = await claims.claim(rows.connection, LeaseTerms(rows.terms.owner, TTL, MARGIN, 5), [lease.task_id])
    assert bool(found) is taken


@pytest.mark.parametrize("of_another", [False, True])
async def test_a_claim_repeated_because_its_answer_was_lost_is_no_loss_of_the_task(
    rows: Rows, of_another: bool
) -> None:
    lease = (await rows.leased()).lease
    if of_another:
        await rows.lapse(lease.task_id)
    owner = terms() if of_another else rows.terms
    (again,) = await claims.claim(rows.connection, owner, [lease.task_id], reclaim=True)
    assert again.lease.epoch == lease.epoch + 1
    assert (await rows.task(lease.task_id))["losses"] == of_another
    await assert_history(rows, (await rows.task(lease.task_id))["job_id"])


async def test_the_last_claim_that_the_losses_allow_is_repeated_too_when_its_answer_was_lost(rows: Rows) -> None:
    """Else the task would wait without a worker until its lease has passed, and then end as lost too often."""
    lease = (await rows.leased()).lease
    await rows.lapse(lease.task_id)
    owner = terms(max_losses=1)
    assert await claims.claim(rows.connection, owner, [lease.task_id])  # the answer is lost
    (again,) = await claims.claim(rows.connection, owner, [lease.task_id], reclaim=True)
    assert again.lease.epoch == lease.epoch + 2
    assert (await rows.task(lease.task_id))["losses"] == 1
    await rows.lapse(lease.task_id)
    assert await claims.claim(rows.connection, terms(max_losses=1), [lease.task_id]) == []


async def test_a_lease_of_its_own_that_passed_is_a_loss_unless_the_claim_is_repeated(rows: Rows) -> None:
    """A handler that stops its worker's heartbeat would else run again for ever."""
    lease = (await rows.leased()).lease
    await rows.lapse(lease.task_id)
    await claims.claim(rows.connection, rows.terms, [lease.task_id])
    assert (await rows.task(lease.task_id))["losses"] == 1


async def test_a_takeover_that_waits_for_a_renewal_takes_nothing(rows: Rows, another: Open) -> None:
    """When the claim began the lease had passed: it must judge the row that the renewal left."""
    lease = (await rows.leased()).lease
    await rows.lapse(lease.task_id)
    heartbeat = await another()
    async with heartbeat.connection.transaction():
        await claims.renew(heartbeat.connection, rows.terms.owner, [lease], TTL)
        taking = asyncio.create_task(claims.claim(rows.connection, terms(), [lease.task_id]))
        await until_waiting(heartbeat.connection)
    assert await taking == []
    task = await rows.task(lease.task_id)
    assert (task["lease_owner"], task["epoch"], task["losses"]) == (lease.owner, lease.epoch, 0)
    await assert_history(rows, task["job_id"])


@pytest.mark.parametrize("way", ["by hint", "by poll"])
async def test_a_claim_that_waits_for_another_takes_nothing(rows: Rows, another: Open, way: str) -> None:
    """Another statement has the task's row alone, as a renewal or a note has it; then the task is somebody's."""
    (hint,) = await rows.submit()
    task_id = hint.hint.task_id
    other = await another()
    async with other.connection.transaction():
        await other.connection.execute(
            "UPDATE task SET status = 'running', lease_owner = $2, lease_until = clock_timestamp() + $3 WHERE id = $1",
            task_id,
            other.terms.owner,
            timedelta(seconds=TTL),
        )
        claiming = asyncio.create_task(
            claims.claim(rows.connection, rows.terms, [task_id]) if way == "by hint" else rows.claim_all()
        )
        await until_waiting(other.connection)
    assert await claiming == []
    assert (await rows.task(task_id))["lease_owner"] == other.terms.owner


async def test_a_takeover_that_waits_while_the_lease_is_ended_charges_nothing(rows: Rows, another: Open) -> None:
    """When the claim began the task ran, with a lease that had passed. It leaves the task to the hint that the sweep
    writes: it read the row as it was, and would count a loss and a lease twice.
    """
    lease = (await rows.leased()).lease
    await rows.lapse(lease.task_id)
    sweeper = await another()
    async with sweeper.connection.transaction():
        _, hints, _ = await sweeps.expire_leases(sweeper.connection, [], 5)
        taking = asyncio.create_task(claims.claim(rows.connection, terms(), [lease.task_id]))
        await until_waiting(sweeper.connection)
    assert await taking == []
    task = await rows.task(lease.task_id)
    assert (task["status"], task["epoch"], task["losses"]) == ("pending", 1, 1)
    assert [hint.hint.task_id for hint in hints] == [lease.task_id]
    await assert_history(rows, task["job_id"])
