"""The window in which a worker trusts a lease, to the instant: the worker's clock is the test's."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.worker.leases import heartbeat as heartbeat_module
from leasehold.worker.leases import held_lease
from leasehold.worker.leases.heartbeat import Heartbeat
from leasehold.worker.leases.registration import Registration
from leasehold.worker.leases.starts import Starts
from tests.factories import Rows

TTL, MARGIN, RENEW = 30.0, 6.0, 10.0
#: How long PostgreSQL's answer takes.
ROUND_TRIP = 4.0


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SlowConnection:
    """The heartbeat's connection. The clock goes on while PostgreSQL answers."""

    rows: Rows
    clock: Clock

    async def fetch(self, *statement: Any) -> Any:
        self.clock.now += ROUND_TRIP
        return await self.rows.connection.fetch(*statement)

    async def fetchrow(self, *statement: Any) -> Any:
        return await self.rows.connection.fetchrow(*statement)

    async def fetchval(self, *statement: Any) -> Any:
        return await self.rows.connection.fetchval(*statement)

    async def execute(self, *statement: Any) -> Any:
        return await self.rows.connection.execute(*statement)

    def is_closed(self) -> bool:
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat_module, "monotonic", clock)
    monkeypatch.setattr(held_lease, "monotonic", clock)
    return clock


@pytest.fixture
async def heartbeat(settings: Settings, rows: Rows, clock: Clock) -> Heartbeat:
    """Not started: the test runs its beats."""
    changes = {"lease_seconds": TTL, "trust_margin_seconds": MARGIN, "renew_seconds": RENEW}
    registration = Registration(rows.terms.owner, ["default"])
    await registration.write(rows.connection)
    changed = settings.model_copy(update=changes)
    heartbeat = Heartbeat(changed, registration, Starts(), lambda _error: None, lambda: None)
    connection: Any = SlowConnection(rows, clock)
    heartbeat._connection = connection
    return heartbeat


@pytest.fixture
async def lease(rows: Rows, clock: Clock) -> Lease:
    return replace((await rows.leased()).lease, trusted_until=clock.now + TTL - MARGIN)


async def test_a_renewal_is_trusted_from_when_it_was_asked_for_until_a_margin_before_its_end(
    heartbeat: Heartbeat, lease: Lease, clock: Clock
) -> None:
    held = heartbeat.hold(lease, 600)
    clock.now += 5.0
    asked_at = clock.now
    await heartbeat._renew()
    assert clock.now > asked_at
    assert held.trusted_until == asked_at + TTL - MARGIN


async def test_a_lease_that_another_owner_has_is_lost_and_not_trusted_anew(
    heartbeat: Heartbeat, lease: Lease, rows: Rows
) -> None:
    held = heartbeat.hold(lease, 600)
    before = held.trusted_until
    await rows.connection.execute("UPDATE task SET epoch = epoch + 1 WHERE id = $1", lease.task_id)
    await heartbeat._renew()
    assert (held.lost, held.trusted(), held.trusted_until) == (True, False, before)


async def test_an_attempt_is_stopped_at_the_end_of_the_trust_and_not_before(
    heartbeat: Heartbeat, lease: Lease, clock: Clock
) -> None:
    stopped: list[float] = []
    held = heartbeat.hold(lease, 600)
    held.subscribe(lambda: stopped.append(clock.now), lambda: None)
    for now, is_trusted in ((lease.trusted_until - 0.001, True), (lease.trusted_until, False)):
        clock.now = now
        assert held.trusted() is is_trusted
        heartbeat._lose_untrusted()
        await asyncio.sleep(0)
        assert (held.lost, bool(stopped)) == (not is_trusted, not is_trusted)
        assert heartbeat.holds(lease.task_id) is is_trusted
    heartbeat._lose_untrusted()
    await asyncio.sleep(0)
    assert stopped == [lease.trusted_until]


async def test_a_lease_is_renewed_no_longer_than_its_attempt_may_take(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, rows: Rows
) -> None:
    async def ends() -> Any:
        return (await rows.task(lease.task_id))["lease_until"]

    first, limit = await ends(), clock.now + 20.0
    heartbeat.hold(lease, 20.0)
    clock.now = limit - 0.001
    await heartbeat._renew()
    assert (last := await ends()) > first
    clock.now = limit
    await heartbeat._renew()
    assert await ends() == last


async def test_ownership_is_confirmed_by_an_answer_for_two_seconds_from_its_question(
    heartbeat: Heartbeat, lease: Lease, clock: Clock
) -> None:
    """The lease is trusted all the time: PostgreSQL may have ended this worker's presence, and freed the task."""
    held = heartbeat.hold(lease, 600)
    assert not heartbeat.ownership_confirmed(lease.task_id)
    await heartbeat._beat()
    asked_at = clock.now - ROUND_TRIP
    for after, confirmed in ((0.0, True), (1.999, True), (2.0, False)):
        clock.now = asked_at + after
        assert heartbeat.ownership_confirmed(lease.task_id) is confirmed, after
        assert held.trusted()


@pytest.mark.parametrize("doubt", ["the lease may have passed", "settling", "presence was interrupted"])
async def test_ownership_is_not_confirmed_while_there_is_one_reason_to_doubt_it(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, doubt: str
) -> None:
    held = heartbeat.hold(lease, 600)
    await heartbeat._beat()
    clock.now -= ROUND_TRIP
    assert heartbeat.ownership_confirmed(lease.task_id)
    match doubt:
        case "the lease may have passed":  # the process stood still, and the first thing that it reads is a hint
            clock.now = held.trusted_until
            heartbeat._answered_at = clock.now
        case "settling":
            held.settlement_sent = True
        case _:
            heartbeat._unconfirmed = True
    assert heartbeat.holds(lease.task_id)
    assert not heartbeat.ownership_confirmed(lease.task_id)


async def test_leases_are_renewed_in_their_time_and_at_once_after_a_presence_was_interrupted(
    heartbeat: Heartbeat, lease: Lease, clock: Clock
) -> None:
    held = heartbeat.hold(lease, 600)
    await heartbeat._beat()
    first = held.trusted_until
    renewed_at = first - TTL + MARGIN
    clock.now = renewed_at + RENEW - 0.001
    await heartbeat._beat()
    assert held.trusted_until == first
    clock.now = renewed_at + RENEW
    await heartbeat._beat()
    assert held.trusted_until == (second := renewed_at + RENEW + TTL - MARGIN)
    connection = heartbeat._connection
    heartbeat._unconfirmed = True
    heartbeat._connection = connection
    await heartbeat._beat()
    assert held.trusted_until > second


@pytest.mark.parametrize(("late", "lost"), [(-0.001, False), (0.0, True)])
async def test_a_claim_that_was_answered_at_the_end_of_its_trust_is_not_begun(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, late: float, lost: bool
) -> None:
    clock.now = lease.trusted_until + late
    assert heartbeat.hold(lease, 600).lost is lost
    assert heartbeat.holds(lease.task_id) is not lost
