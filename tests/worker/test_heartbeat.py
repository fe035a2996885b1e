"""The heartbeat beside a network that does not answer: a lease that cannot be renewed is given up in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from chaos.postgres_tap import PostgresTap
from chaos.proxy import Link
from leasehold.db.database import connect
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.settings import Settings
from leasehold.telemetry import database
from leasehold.transitions import claims, jobs, sweeps, workers
from leasehold.transitions.claims import LeaseTerms
from leasehold.transitions.settlements import Failure, fail
from leasehold.worker.leases.claim_batcher import ClaimBatcher
from leasehold.worker.leases.heartbeat import Heartbeat
from leasehold.worker.leases.registration import Registration
from leasehold.worker.leases.starts import Starts
from tests import factories
from tests.factories import Rows
from tests.support.lock_waits import until_waiting

SECONDS = 60.0
#: Trusted for longer than a test takes.
TTL, MARGIN = 600.0, 10.0
#: Trusted for two seconds. Ten more lie between giving a lease up in time and too late: a slow machine has them.
SHORT = pytest.mark.parametrize("heartbeat", [(12.0, MARGIN)], indirect=True)


@pytest.fixture
async def link(settings: Settings) -> AsyncIterator[Link]:
    there = urlsplit(settings.database_url.get_secret_value())
    assert there.hostname is not None
    assert there.port is not None
    link = Link((there.hostname, there.port), lambda: PostgresTap("worker", lambda _session: None))
    await link.open()
    yield link
    await link.close()


@pytest.fixture
async def rows(settings: Settings) -> AsyncIterator[Rows]:
    connection = await connect(settings, "test")
    yield Rows(connection, LeaseTerms(new_id(), TTL, MARGIN, 5))
    await connection.close()


@pytest.fixture
async def heartbeat(
    settings: Settings, link: Link, rows: Rows, request: pytest.FixtureRequest
) -> AsyncIterator[Heartbeat]:
    ttl, margin = getattr(request, "param", (TTL, MARGIN))
    url = settings.database_url.get_secret_value()
    through = url.replace(f":{urlsplit(url).port}/", f":{link.port}/")
    # A statement may take so long that only a watch beside it can be in time.
    changes = {
        "database_url": SecretStr(through), "database_timeout": 10 * SECONDS, "lease_seconds": ttl,
        "renew_seconds": 0.2, "trust_margin_seconds": margin,
    }  # fmt: skip
    registration = Registration(rows.terms.owner, ["default"])
    changed = settings.model_copy(update=changes)
    heartbeat = Heartbeat(changed, registration, Starts(), lambda _error: None, lambda: None)
    heartbeat.start()
    yield heartbeat
    link.heal()
    link.reset()
    await asyncio.to_thread(heartbeat.close)


async def test_a_worker_is_present_until_its_heartbeat_closes(heartbeat: Heartbeat, rows: Rows) -> None:
    """Others take its tasks at once when it has ended, and not before."""
    await heartbeat.wait_for_presence(SECONDS)
    assert await rows.connection.fetchval("SELECT present FROM worker WHERE id = $1", rows.terms.owner)
    assert await workers.dead(rows.connection) == []
    assert database.UP._value.get() == 1
    assert heartbeat._thread.daemon  # a thread that hangs keeps no worker from its end
    await asyncio.to_thread(heartbeat.close)  # the link to PostgreSQL runs in this loop
    assert not heartbeat._thread.is_alive()
    async with asyncio.timeout(SECONDS):
        while await workers.dead(rows.connection) != [rows.terms.owner]:
            await asyncio.sleep(0.02)


async def held_and_renewed(heartbeat: Heartbeat, rows: Rows) -> tuple[Lease, asyncio.Event]:
    """A lease that the heartbeat has renewed and knows to be so, and the event of its attempt being stopped."""
    lease = (await rows.leased()).lease
    first = (await rows.task(lease.task_id))["lease_until"]
    stopped = asyncio.Event()
    heartbeat.hold(lease, 600).subscribe(stopped.set, lambda: None)
    async with asyncio.timeout(SECONDS):
        while (
            (await rows.task(lease.task_id))["lease_until"] == first
            or not heartbeat.ownership_confirmed(lease.task_id)
            or not heartbeat.holds(lease.task_id)
        ):
            if stopped.is_set():  # this process stood still for longer than the lease is trusted
                return await held_and_renewed(heartbeat, rows)
            await asyncio.sleep(0.02)
    return lease, stopped


@SHORT
async def test_an_attempt_is_stopped_before_its_lease_passes_although_the_renewal_hangs(
    heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    lease, stopped = await held_and_renewed(heartbeat, rows)
    link.hold(["leasehold heartbeat"])
    await asyncio.wait_for(stopped.wait(), SECONDS)
    in_time = "SELECT lease_until > clock_timestamp() FROM task WHERE id = $1"
    assert await rows.connection.fetchval(in_time, lease.task_id)
    assert not heartbeat.holds(lease.task_id)  # a hint of this task is not taken for one of what runs here


async def test_ownership_is_not_confirmed_while_the_database_does_not_answer(
    heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    lease, _ = await held_and_renewed(heartbeat, rows)
    link.hold(["leasehold heartbeat"])
    async with asyncio.timeout(SECONDS):
        while heartbeat.ownership_confirmed(lease.task_id):
            await asyncio.sleep(0.02)
    link.heal()
    link.reset()
    async with asyncio.timeout(SECONDS):
        while not heartbeat.ownership_confirmed(lease.task_id):
            await asyncio.sleep(0.02)


async def test_ownership_is_not_confirmed_while_somebody_may_be_taking_the_task(
    settings: Settings, heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    """The sweeper is at it: a renewal passes over the row, and it is neither confirmed nor lost."""
    lease, _ = await held_and_renewed(heartbeat, rows)
    before = (await rows.task(lease.task_id))["lease_until"]
    sweeper = await connect(settings, "test")
    try:
        async with sweeper.transaction():
            await sweeper.execute("SELECT FROM task WHERE id = $1 FOR UPDATE", lease.task_id)
            link.reset()
            await asyncio.sleep(0.8)  # it is back, and has asked
            assert not heartbeat.ownership_confirmed(lease.task_id)
    finally:
        await sweeper.close()
    async with asyncio.timeout(SECONDS):
        while not heartbeat.ownership_confirmed(lease.task_id):
            await asyncio.sleep(0.02)
    assert (await rows.task(lease.task_id))["lease_until"] > before


async def test_the_hint_of_a_task_that_was_taken_from_us_unnoticed_is_claimed_and_not_acknowledged_away(
    settings: Settings, rows: Rows
) -> None:
    """The database was away: our presence ended, the sweeper freed the task, and its hint came before we heard."""
    (announced,) = await rows.submit()
    holds = confirmed = False
    heartbeat: Any = SimpleNamespace(holds=lambda _task: holds, ownership_confirmed=lambda _task: confirmed)
    batcher = ClaimBatcher(settings, rows.terms, heartbeat, at_most=8)
    batcher.start()
    try:
        holds = True
        asked = asyncio.create_task(batcher.claim(announced.hint.task_id))
        await asyncio.sleep(0.3)
        assert not asked.done()
        holds, confirmed = False, True
        assert await asyncio.wait_for(asked, SECONDS) is not None
    finally:
        await batcher.close()


async def test_the_hint_of_a_task_that_runs_here_for_certain_is_acknowledged_without_a_word_to_the_database(
    settings: Settings,
) -> None:
    heartbeat: Any = SimpleNamespace(holds=lambda _task: True, ownership_confirmed=lambda _task: True)
    batcher = ClaimBatcher(settings, factories.terms(), heartbeat, at_most=8)  # not started: it could ask nothing
    asked = asyncio.create_task(batcher.claim(new_id()))
    try:
        await asyncio.sleep(0)
        assert asked.done()
        assert asked.result() is None
    finally:
        asked.cancel()
        await batcher.close()


async def test_the_hint_of_a_task_that_we_have_settled_unheard_and_that_is_due_again_is_claimed(
    settings: Settings, heartbeat: Heartbeat, rows: Rows
) -> None:
    """The commit has happened, its answer is on a slow link, and a hint comes: it is not of what we run."""
    lease = (await rows.leased()).lease
    held = heartbeat.hold(lease, 600)
    held.settlement_sent = True
    batcher = ClaimBatcher(settings, rows.terms, heartbeat, at_most=8)
    batcher.start()
    try:
        assert heartbeat.holds(lease.task_id)
        assert not heartbeat.ownership_confirmed(lease.task_id)
        asked = asyncio.create_task(batcher.claim(lease.task_id))
        await asyncio.sleep(0.1)
        assert not asked.done()
        await fail(rows.connection, [Failure(lease, "error", "e", "m", retryable=True, delay=0.0)])
        again = await asyncio.wait_for(asked, SECONDS)  # the renewal hears of it, if the answer does not come
        assert again is not None
        assert again.lease.epoch == lease.epoch + 1
    finally:
        await batcher.close()


async def test_a_new_claim_of_a_task_stops_the_older_attempt_of_the_same_worker(
    heartbeat: Heartbeat, rows: Rows
) -> None:
    lease, stopped = await held_and_renewed(heartbeat, rows)
    again = heartbeat.hold(Lease(lease.task_id, lease.owner, lease.epoch + 1, 2, lease.trusted_until), 600)
    await asyncio.wait_for(stopped.wait(), SECONDS)
    assert heartbeat.holds(lease.task_id)
    assert not again.lost


async def test_a_claim_that_was_heard_of_too_late_to_be_trusted_is_not_begun(heartbeat: Heartbeat, rows: Rows) -> None:
    """Its answer was on a slow link; meanwhile somebody else may have taken the task."""
    lease = replace((await rows.leased()).lease, trusted_until=monotonic())
    stopped: list[str] = []
    held = heartbeat.hold(lease, 600)
    held.subscribe(lambda: stopped.append("at once"), lambda: None)
    assert stopped == ["at once"]
    assert not heartbeat.holds(lease.task_id)


async def test_a_claim_that_was_heard_of_after_a_later_one_does_not_stop_that(heartbeat: Heartbeat, rows: Rows) -> None:
    later, stopped = await held_and_renewed(heartbeat, rows)
    earlier = heartbeat.hold(replace(later, epoch=later.epoch - 1), 600)
    assert earlier.lost
    assert heartbeat.holds(later.task_id)
    heartbeat.drop(earlier)
    assert heartbeat.holds(later.task_id)
    assert not stopped.is_set()


async def test_a_claim_with_the_epoch_of_what_runs_here_leaves_the_task_to_it(heartbeat: Heartbeat, rows: Rows) -> None:
    """An asynchronous failover forgot the claim, and the worker has claimed the task again: its attempt owns the task
    still. A second attempt with the same owner and epoch could replace what the first one settles.
    """
    lease, stopped = await held_and_renewed(heartbeat, rows)
    again = heartbeat.hold(lease, 600)
    assert again.lost
    heartbeat.drop(again)
    assert heartbeat.holds(lease.task_id)
    assert not stopped.is_set()


async def test_a_claim_with_the_epoch_of_a_lost_lease_is_begun(heartbeat: Heartbeat, rows: Rows) -> None:
    lease = (await rows.leased()).lease
    assert heartbeat.hold(replace(lease, trusted_until=monotonic()), 600).lost
    assert not heartbeat.hold(lease, 600).lost
    assert heartbeat.holds(lease.task_id)


async def test_a_worker_that_comes_back_learns_at_once_what_it_has_lost_meanwhile(
    settings: Settings, heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    lease, stopped = await held_and_renewed(heartbeat, rows)
    link.hold(["leasehold heartbeat"])
    await rows.connection.execute(
        "UPDATE task SET epoch = epoch + 1, lease_owner = $2 WHERE id = $1", lease.task_id, new_id()
    )
    link.heal()
    link.reset()
    await asyncio.wait_for(stopped.wait(), SECONDS)


async def test_a_worker_whose_row_is_lost_registers_again_and_is_present_again(
    settings: Settings, heartbeat: Heartbeat, rows: Rows
) -> None:
    """An asynchronous failover can lose the row with the last commits, and the presence key may belong to another."""
    await held_and_renewed(heartbeat, rows)
    worker = "FROM worker WHERE id = $1"
    before = await rows.connection.fetchval(f"DELETE {worker} RETURNING presence_key", rows.terms.owner)
    async with asyncio.timeout(SECONDS):
        while not (await rows.connection.fetchval(f"SELECT present {worker}", rows.terms.owner)):
            await asyncio.sleep(0.02)
    after = await rows.connection.fetchval(f"SELECT presence_key {worker}", rows.terms.owner)
    assert after != before
    looking = await connect(settings, "test")
    try:
        assert await workers.dead(looking) == []  # it holds the lock of its new key
        old_key_is_free = await looking.fetchval("SELECT pg_try_advisory_lock($1, $2)", workers.PRESENCE, before)
        assert old_key_is_free
    finally:
        await looking.close()


async def earlier_session(settings: Settings, heartbeat: Heartbeat, link: Link, rows: Rows) -> Any:
    """The heartbeat has lost its connection. A session holds its presence lock, as the earlier one does on a server
    that has not noticed yet that the client is gone.
    """
    key = await rows.connection.fetchval("SELECT presence_key FROM worker WHERE id = $1", rows.terms.owner)
    earlier = await connect(settings, "test")
    taking = asyncio.create_task(earlier.execute("SELECT pg_advisory_lock($1, $2)", workers.PRESENCE, key))
    await until_waiting(rows.connection, kind="advisory")
    link.reset()
    await taking
    return earlier


async def test_leases_are_kept_while_the_server_believes_that_an_earlier_session_of_the_worker_lives(
    settings: Settings, heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    """A network that was away for a moment costs no attempt: the server notices the end of a session after 20 s."""
    lease, stopped = await held_and_renewed(heartbeat, rows)
    earlier = await earlier_session(settings, heartbeat, link, rows)
    try:
        until = (await rows.task(lease.task_id))["lease_until"]
        async with asyncio.timeout(SECONDS):
            for _ in range(2):  # the first change may be of a renewal that began before the end of the connection
                while (await rows.task(lease.task_id))["lease_until"] == until:
                    await asyncio.sleep(0.02)
                until = (await rows.task(lease.task_id))["lease_until"]
        assert not heartbeat.ownership_confirmed(lease.task_id)
    finally:
        await earlier.close()
    async with asyncio.timeout(SECONDS):
        while not heartbeat.ownership_confirmed(lease.task_id):
            await asyncio.sleep(0.02)
    assert await workers.dead(rows.connection) == []
    assert not stopped.is_set()


async def test_a_heartbeat_that_waits_for_a_locked_row_leaves_no_session_behind(settings: Settings, rows: Rows) -> None:
    """Its statement takes too long again and again. A session for each time would fill `max_connections`."""
    registration = Registration(rows.terms.owner, ["default"])
    hasty = settings.model_copy(update={"database_timeout": 1.0, "renew_seconds": 0.2})
    heartbeat = Heartbeat(hasty, registration, Starts(), lambda _error: None, lambda: None)
    await registration.write(rows.connection)
    waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    looking = await connect(settings, "test")
    try:
        async with rows.connection.transaction(), asyncio.timeout(SECONDS):
            await rows.connection.execute("SELECT FROM worker FOR UPDATE")
            heartbeat.start()
            seen: set[int] = set()
            while len(seen) < 4:
                pids = {row["pid"] for row in await looking.fetch(waiting)}
                assert len(pids) <= 2  # the one that is being ended, and its successor
                seen |= pids
                await asyncio.sleep(0.02)
        await heartbeat.wait_for_presence(SECONDS)
        assert await workers.dead(looking) == []
    finally:
        await asyncio.to_thread(heartbeat.close)
        await looking.close()


async def test_a_worker_that_closes_waits_no_longer_for_a_presence_that_its_earlier_session_has(
    settings: Settings, heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    await heartbeat.wait_for_presence(SECONDS)
    earlier = await earlier_session(settings, heartbeat, link, rows)
    try:
        await asyncio.to_thread(heartbeat.close)
        assert not heartbeat._thread.is_alive()
    finally:
        await earlier.close()


async def test_after_a_reconnect_a_worker_gives_back_what_it_does_not_hold_and_nothing_else(
    heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    """Its settlement was in the tail that an asynchronous failover lost: the task is running again, by nobody."""
    held, stopped = await held_and_renewed(heartbeat, rows)
    (cancelled,) = await rows.submit()
    forgotten = (await rows.leased()).lease
    await claims.claim(rows.connection, rows.terms, [cancelled.hint.task_id])
    job = (await rows.task(cancelled.hint.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")
    await asyncio.sleep(2.5)
    assert (await rows.task(forgotten.task_id))["status"] == "running"  # without a reconnect it is a claim on its way
    link.reset()
    async with asyncio.timeout(SECONDS):
        while (await rows.task(forgotten.task_id))["status"] != "pending":
            await asyncio.sleep(0.02)
        while (await rows.job(job))["status"] != "cancelled":
            await asyncio.sleep(0.02)
    task = await rows.task(forgotten.task_id)
    assert (task["losses"], task["errors"], task["attempt"]) == (0, 0, 0)
    assert (await rows.task(held.task_id))["status"] == "running"
    assert not stopped.is_set()
    assert heartbeat.holds(held.task_id)


async def test_after_a_lost_answer_a_worker_releases_what_it_does_not_hold_and_nothing_else(
    heartbeat: Heartbeat, rows: Rows
) -> None:
    """The lost commit claimed tasks. One is of a job that is cancelled: the worker cannot claim it again."""
    held, stopped = await held_and_renewed(heartbeat, rows)
    forgotten = (await rows.leased()).lease
    cancelled = await rows.leased()
    await jobs.request_cancel(rows.connection, [cancelled.job_id], "t", reason="r", by="b")
    heartbeat.record_lost_answer()
    async with asyncio.timeout(SECONDS):
        while (await rows.task(forgotten.task_id))["status"] != "pending":
            await asyncio.sleep(0.02)
        while (await rows.job(cancelled.job_id))["status"] != "cancelled":
            await asyncio.sleep(0.02)
    later = (await rows.leased()).lease
    await asyncio.sleep(2.5)  # twice the time between the two queries that find an orphan
    assert [(await rows.task(lease.task_id))["status"] for lease in (held, later)] == ["running", "running"]
    assert not stopped.is_set()


@SHORT
async def test_after_a_failover_that_outlasted_the_leases_a_worker_gives_its_tasks_back_without_a_loss(
    heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    """Its attempts were stopped when their leases were no longer trusted. The sweeper looks all the time."""
    lease, stopped = await held_and_renewed(heartbeat, rows)
    link.hold(["leasehold heartbeat"])
    await asyncio.wait_for(stopped.wait(), SECONDS)
    heartbeat.drop(heartbeat._held[lease.task_id])
    await rows.connection.execute("UPDATE worker SET incarnation = incarnation - interval '1 hour'")
    late = "UPDATE task SET lease_until = clock_timestamp() - interval '5 seconds' WHERE id = $1"
    await rows.connection.execute(late, lease.task_id)
    link.heal()
    link.reset()
    async with asyncio.timeout(SECONDS):
        while (await rows.task(lease.task_id))["status"] == "running":
            await sweeps.expire_leases(rows.connection, [], 5)
            await asyncio.sleep(0.02)
    task = await rows.task(lease.task_id)
    assert (task["status"], task["losses"]) == ("pending", 0)


async def test_what_was_claimed_after_the_reconnect_is_not_given_back(
    heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    """A claim's answer may be on its way for any time."""
    await held_and_renewed(heartbeat, rows)
    forgotten = (await rows.leased()).lease
    before, orphans = heartbeat._connection, heartbeat._orphans
    began_before = orphans._search_began_at
    link.reset()
    async with asyncio.timeout(SECONDS):
        while heartbeat._connection is before or orphans._search_began_at in (None, began_before):
            await asyncio.sleep(0.02)
        claimed = (await rows.leased()).lease
        while (await rows.task(forgotten.task_id))["status"] != "pending":
            await asyncio.sleep(0.02)
    assert (await rows.task(claimed.task_id))["status"] == "running"


async def test_a_lost_lease_is_given_back_only_when_its_attempt_has_stopped(
    heartbeat: Heartbeat, link: Link, rows: Rows
) -> None:
    lease = (await rows.leased()).lease
    held = heartbeat.hold(lease, 600)
    await asyncio.sleep(0.5)
    held.lost = True  # as when its trust ended while the database was away
    link.reset()
    await asyncio.sleep(2.5)
    assert (await rows.task(lease.task_id))["status"] == "running"
    heartbeat.drop(held)
    async with asyncio.timeout(SECONDS):
        while (await rows.task(lease.task_id))["status"] != "pending":
            await asyncio.sleep(0.02)
