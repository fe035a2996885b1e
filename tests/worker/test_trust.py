"""The window in which a worker trusts a lease, to the instant: the worker's clock is the test's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from structlog.contextvars import bound_contextvars, merge_contextvars
from structlog.testing import capture_logs

from leasehold.db.database import connect
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.telemetry import database
from leasehold.transitions import jobs, workers
from leasehold.worker import metrics
from leasehold.worker.leases import heartbeat as heartbeat_module
from leasehold.worker.leases import held_lease, orphans
from leasehold.worker.leases.heartbeat import Heartbeat
from leasehold.worker.leases.registration import Registration
from leasehold.worker.leases.starts import Starts
from tests.factories import Rows
from tests.support.clock import Clock

TTL, MARGIN, RENEW = 30.0, 6.0, 10.0
#: How long PostgreSQL's answer takes.
ROUND_TRIP = 4.0


@dataclass
class SlowConnection:
    """The heartbeat's connection. The clock goes on while PostgreSQL answers."""

    rows: Rows
    clock: Clock
    terminated: bool = False
    asked_to_close: bool = False

    def terminate(self) -> None:
        self.terminated = True

    async def close(self) -> None:
        self.asked_to_close = True

    def transaction(self) -> Any:
        return self.rows.connection.transaction()

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
        return self.terminated


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
    heartbeat._is_present = True
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


@pytest.mark.parametrize("was_lost", [False, True])
async def test_what_still_runs_of_an_attempt_that_has_ended_writes_nothing(
    heartbeat: Heartbeat, lease: Lease, was_lost: bool
) -> None:
    """A handler's thread may go on for any time."""
    held = heartbeat.hold(lease, 600)
    held.lost = was_lost
    heartbeat.drop(held)
    assert (held.lost, held.trusted(), heartbeat.all_held()) == (True, False, [])


async def test_the_log_says_which_attempt_has_lost_its_lease(heartbeat: Heartbeat, lease: Lease, clock: Clock) -> None:
    with bound_contextvars(job_id="of the attempt"):
        heartbeat.hold(lease, 600)
    clock.now = lease.trusted_until
    with capture_logs([merge_contextvars]) as lines:
        heartbeat._lose_untrusted()
        heartbeat._lose_untrusted()
    assert [(line["event"], line["job_id"]) for line in lines] == [("lease lost", "of the attempt")]


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


async def test_a_lease_that_is_lost_is_renewed_no_more_and_lets_the_others_be_confirmed(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, rows: Rows
) -> None:
    """An attempt that does not end would keep a task from the worker that may have it."""
    other = heartbeat.hold(lease, 600)
    lost = heartbeat.hold(replace((await rows.leased()).lease, trusted_until=lease.trusted_until), 600)
    lost.lost = True
    before = (await rows.task(lost.lease.task_id))["lease_until"]
    await heartbeat._renew()
    assert (await rows.task(lost.lease.task_id))["lease_until"] == before
    await rows.connection.execute("UPDATE task SET epoch = epoch + 1 WHERE id = $1", lease.task_id)
    heartbeat._unconfirmed = True
    await heartbeat._beat()
    assert other.lost
    clock.now = heartbeat._answered_at
    assert heartbeat.ownership_confirmed(lost.lease.task_id)  # that it is lost
    assert heartbeat.ownership_confirmed(new_id())


async def test_a_lease_is_renewed_no_longer_than_its_attempt_may_take(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, rows: Rows
) -> None:
    """An attempt that takes longer is stopped, once, while its lease is trusted."""

    async def ends() -> Any:
        return (await rows.task(lease.task_id))["lease_until"]

    first, limit = await ends(), clock.now + 20.0
    held = heartbeat.hold(lease, 20.0)
    stops: list[bool] = []
    held.subscribe(lambda: stops.append(held.trusted()), lambda: None)
    clock.now = limit - 0.001
    await heartbeat._renew()
    assert (last := await ends()) > first
    assert not held.overdue
    clock.now = limit
    for _ in range(2):
        await heartbeat._renew()
        await asyncio.sleep(0)  # the main loop is told
    assert await ends() == last
    assert (held.overdue, held.lost, stops) == (True, False, [True])


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
    clock.now += 1.0
    await heartbeat._beat()
    first = held.trusted_until
    assert first > lease.trusted_until  # at once after the start, too
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


async def test_leases_are_renewed_in_their_time_while_an_earlier_session_has_the_presence(
    settings: Settings, heartbeat: Heartbeat, lease: Lease, clock: Clock, rows: Rows
) -> None:
    """The worker tries to appear many times a second: a renewal with each of these tries would be a load."""
    key = await rows.connection.fetchval("SELECT presence_key FROM worker")
    heartbeat._presence_key, heartbeat._is_present = key, False
    held = heartbeat.hold(lease, 600)
    earlier = await connect(settings, "test")
    try:
        assert await workers.appear(earlier, rows.terms.owner, key)
        heartbeat._renewed_at = clock.now
        clock.now += 1.0
        await heartbeat._beat()
        assert held.trusted_until == lease.trusted_until
        clock.now = renewed_at = heartbeat._renewed_at + RENEW
        await heartbeat._beat()
        assert held.trusted_until == renewed_at + TTL - MARGIN
        await earlier.execute("SELECT pg_advisory_unlock_all()")
        clock.now = renewed_at = heartbeat._renewed_at + 1.0
        await heartbeat._beat()
        assert held.trusted_until == renewed_at + TTL - MARGIN  # at once, now that the worker is present
    finally:
        await earlier.close()


@pytest.mark.parametrize("reason", ["it is switched off", "a pooler"])
async def test_a_worker_without_presence_starts_and_confirms_its_leases(
    heartbeat: Heartbeat, lease: Lease, rows: Rows, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    async def is_direct(_connection: object) -> bool:
        return reason != "a pooler"

    monkeypatch.setattr(heartbeat_module, "is_direct", is_direct)
    switched = heartbeat._settings.model_copy(update={"presence": reason == "a pooler"})
    monkeypatch.setattr(heartbeat, "_settings", switched)
    heartbeat._disconnect()
    heartbeat.hold(lease, 600)
    await heartbeat._beat()
    try:
        await asyncio.wait_for(heartbeat.wait_for_presence(600), 60)
        assert heartbeat.ownership_confirmed(lease.task_id)
        assert not await rows.connection.fetchval("SELECT present FROM worker")
        assert not await rows.connection.fetchval(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = $1::oid AND database ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())",
            workers.PRESENCE,
        )  # other clients of a pooler would use the session that has it
    finally:
        heartbeat._disconnect()


async def test_the_worker_hears_that_an_operator_asks_it_to_drain(
    heartbeat: Heartbeat, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(heartbeat, "_on_drain", lambda: heard.append("drain"))
    await heartbeat._renew()
    await asyncio.sleep(0)
    assert heard == []
    await workers.ask_to_drain(rows.connection, rows.terms.owner)
    await heartbeat._renew()
    await asyncio.sleep(0)
    assert heard == ["drain"]


async def test_a_job_that_ends_with_the_release_of_an_orphan_is_counted(
    heartbeat: Heartbeat, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[tuple[str, str]] = []
    monkeypatch.setattr(orphans, "monotonic", clock)
    monkeypatch.setattr(
        heartbeat_module, "count_ended_jobs", lambda ends: counted.extend((job.pipeline, job.outcome) for job in ends)
    )
    cancelled = await rows.leased()
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="r", by="b")
    heartbeat.record_lost_answer()
    for ended in ([], [("one", "cancelled")], [("one", "cancelled")]):
        await heartbeat._beat()
        await asyncio.sleep(0)
        assert counted == ended
        clock.now += 1.0


@pytest.mark.parametrize(("late", "lost"), [(-0.001, False), (0.0, True)])
async def test_a_claim_that_was_answered_at_the_end_of_its_trust_is_not_begun(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, late: float, lost: bool
) -> None:
    clock.now = lease.trusted_until + late
    before = metrics.LOST._value.get()
    assert heartbeat.hold(lease, 600).lost is lost
    assert metrics.LOST._value.get() - before == lost
    assert heartbeat.holds(lease.task_id) is not lost


async def test_an_older_attempt_trusts_nothing_once_the_worker_has_claimed_its_task_anew(
    heartbeat: Heartbeat, lease: Lease
) -> None:
    stopped: list[str] = []
    older = heartbeat.hold(lease, 600)
    older.subscribe(lambda: stopped.append("stopped"), lambda: None)
    assert older.trusted()
    for epoch in (1, 2):
        heartbeat.hold(replace(lease, epoch=lease.epoch + epoch), 600)
        assert (older.lost, older.trusted(), stopped) == (True, False, ["stopped"])


async def test_an_attempt_that_has_lost_its_lease_is_not_stopped_again_by_the_next_claim(
    heartbeat: Heartbeat, lease: Lease
) -> None:
    """It may be cleaning up."""
    stopped: list[str] = []
    lost = heartbeat.hold(lease, 600)
    lost.subscribe(lambda: stopped.append("stopped"), lambda: None)
    lost.lost = True
    assert not heartbeat.hold(replace(lease, epoch=lease.epoch + 1), 600).lost
    assert stopped == []


async def test_a_claim_that_was_heard_of_after_a_later_one_that_is_lost_is_not_begun(
    heartbeat: Heartbeat, lease: Lease
) -> None:
    later = heartbeat.hold(lease, 600)
    later.lost = True
    assert heartbeat.hold(replace(lease, epoch=lease.epoch - 1), 600).lost
    assert not heartbeat.holds(lease.task_id)


async def test_a_cancel_is_heard_of_between_two_renewals_and_once(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, rows: Rows
) -> None:
    held = heartbeat.hold(lease, 600)
    told: list[str] = []
    held.subscribe(lambda: None, lambda: told.append("cancelled"))
    await heartbeat._beat()
    assert (held.cancelled, told) == (False, [])
    job = (await rows.task(lease.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")
    until = held.trusted_until
    for _ in range(2):
        clock.now = heartbeat._renewed_at
        await heartbeat._beat()
        await asyncio.sleep(0)
    assert held.trusted_until == until
    assert (held.cancelled, held.lost, told) == (True, False, ["cancelled"])


async def test_a_renewal_hears_of_a_cancel_too(heartbeat: Heartbeat, lease: Lease, rows: Rows) -> None:
    held = heartbeat.hold(lease, 600)
    job = (await rows.task(lease.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")
    await heartbeat._renew()
    assert (held.cancelled, held.lost) == (True, False)


async def test_a_worker_that_runs_nothing_knows_that_it_holds_nothing(heartbeat: Heartbeat) -> None:
    await heartbeat._beat()
    assert heartbeat.ownership_confirmed(task := new_id())
    assert not heartbeat.holds(task)


@pytest.mark.parametrize(
    "error", ["its row is lost", "no answer", "the network", "unforeseen", "the session has ended"]
)
async def test_a_worker_that_cannot_ask_confirms_nothing_until_it_has_connected_and_renewed_again(
    heartbeat: Heartbeat, lease: Lease, clock: Clock, rows: Rows, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Its presence may be over, and others may take its tasks."""
    monkeypatch.setattr(heartbeat_module, "_AFTER_ERROR_SECONDS", 0.0)
    recorded: list[str] = []
    monkeypatch.setattr(heartbeat_module, "record_unforeseen", lambda name, _error: recorded.append(name))
    heartbeat.hold(lease, 600)
    await heartbeat._beat()
    connection: Any = heartbeat._connection
    database.UP.set(1)

    async def fail(error: Exception) -> None:
        raise error

    match error:
        case "its row is lost":
            await rows.connection.execute("DELETE FROM worker")
            heartbeat._renewed_at -= RENEW
        case "no answer":
            monkeypatch.setattr(heartbeat, "_read_cancels", lambda: fail(TimeoutError()))
        case "the network":
            monkeypatch.setattr(heartbeat, "_read_cancels", lambda: fail(ConnectionError()))
        case "unforeseen":
            monkeypatch.setattr(heartbeat, "_read_cancels", lambda: fail(ZeroDivisionError()))
        case _:
            connection.terminated = True
            heartbeat._woken.set()
            await heartbeat._pause(60.0)
            assert not heartbeat._woken.is_set()
    if error != "the session has ended":
        await heartbeat._beat()
    heartbeat._answered_at = clock.now  # only just before
    assert heartbeat._connection is None
    assert connection.terminated  # else its session would keep the presence from the next one
    # A statement without an answer may wait for a lock: it is cancelled. A lost network would not answer to that.
    assert connection.asked_to_close is (error == "no answer")
    assert not heartbeat.ownership_confirmed(lease.task_id)
    assert database.UP._value.get() == 0
    await heartbeat._pause(0.0)
    assert recorded == (["heartbeat"] if error == "unforeseen" else [])


async def test_the_worker_hears_that_its_heartbeat_has_ended_with_an_error(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would stop its attempts when their leases pass."""
    errors: list[Exception] = []
    heard = asyncio.Event()

    def hear(error: Exception) -> None:
        errors.append(error)
        heard.set()

    async def nothing() -> None:
        return

    monkeypatch.setattr(heartbeat, "_on_failure", hear)
    monkeypatch.setattr(heartbeat, "_beat", nothing)
    monkeypatch.setattr(heartbeat, "_lose_untrusted", lambda: 1 // 0)
    heartbeat.start()
    await asyncio.wait_for(heard.wait(), 60)
    assert isinstance(errors[0], ZeroDivisionError)
    heartbeat.close()
    assert not heartbeat._thread.is_alive()


@pytest.mark.parametrize(("renew", "at_most"), [(10.0, 0.5), (0.4, 0.1)])
async def test_the_heartbeat_looks_at_least_twice_a_second_and_four_times_for_each_renewal(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch, renew: float, at_most: float
) -> None:
    pauses: list[float] = []

    async def nothing() -> None:
        return

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        heartbeat._is_present = False
        heartbeat._connection = heartbeat._connection if len(pauses) == 1 else None
        heartbeat._closing = len(pauses) == 3

    monkeypatch.setattr(heartbeat, "_settings", heartbeat._settings.model_copy(update={"renew_seconds": renew}))
    monkeypatch.setattr(heartbeat, "_beat", nothing)
    monkeypatch.setattr(heartbeat, "_pause", pause)
    await asyncio.wait_for(heartbeat._run(), 60)
    assert pauses == [at_most, 0.05, 0.1]  # present; an earlier session has the presence; not connected


async def test_a_pause_lasts_until_something_wakes_it(heartbeat: Heartbeat) -> None:
    pausing = asyncio.create_task(heartbeat._pause(60.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not pausing.done()
    heartbeat._woken.set()
    await asyncio.wait_for(pausing, 60)
    assert heartbeat._connection is not None


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ((), []),
        (("cancelled",), ["cancel"]),
        (("lost",), ["stop"]),
        (("overdue",), ["stop"]),
        (("lost", "cancelled"), ["stop"]),
    ],
)
async def test_an_attempt_that_begins_late_is_told_at_once_what_its_lease_has_met(
    heartbeat: Heartbeat, lease: Lease, known: Sequence[str], told: list[str]
) -> None:
    """A workflow is claimed with its cancel already known."""
    held = heartbeat.hold(lease, 600)
    for what in known:
        setattr(held, what, True)
    heard: list[str] = []
    held.subscribe(lambda: heard.append("stop"), lambda: heard.append("cancel"))
    assert heard == told


async def test_a_lease_whose_attempt_has_not_begun_may_be_lost(heartbeat: Heartbeat, lease: Lease) -> None:
    held = heartbeat.hold(lease, 600)
    held.notify_stop()
    held.notify_cancelled()
    heard: list[str] = []
    held.subscribe(lambda: heard.append("stop"), lambda: heard.append("cancel"))
    held.notify_stop()
    held.notify_cancelled()
    assert heard == ["stop", "cancel"]
