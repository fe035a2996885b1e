"""The duties of a worker, each by itself: one turn of it, and what the rows and the announcer say then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import asyncpg
import orjson
import pytest

from leasehold import App
from leasehold.broker import Hint, outbox
from leasehold.broker.announcer import Announcer
from leasehold.broker.outbox import Announcement
from leasehold.db import audit
from leasehold.db.audit import Target
from leasehold.db.database import Pool, connected, make_pool
from leasehold.domain.audit import Actor
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.evaluation.templates import Templates
from leasehold.exporter.jobs import JOBS
from leasehold.pipelines.conversion.pipeline import CONVERSION
from leasehold.pipelines.webhooks.pipeline import webhooks as deliveries
from leasehold.runtime.duty_cycle import Pauses
from leasehold.schedules import firing
from leasehold.schedules.declared import reconcile
from leasehold.settings import Settings
from leasehold.storage.store import ObjectStore
from leasehold.transitions import claims, concurrency, jobs, settlements
from leasehold.transitions.settlements import Completion, Snoozing, Suspending
from leasehold.transitions.workflows import children
from leasehold.transitions.workflows.records import Call
from leasehold.worker import metrics
from leasehold.worker.leases.registration import Registration
from leasehold.worker.maintenance import duties as all_duties
from leasehold.worker.maintenance import relay as relaying
from leasehold.worker.maintenance.admitter import Admitter
from leasehold.worker.maintenance.duties import Duties, _shared
from leasehold.worker.maintenance.housekeeping import NEXT_BATCH_SECONDS
from leasehold.worker.maintenance.relay import Relay
from leasehold.worker.maintenance.takeover import Leadership, Takeover
from tests.factories import ONE, SELDOM, Rows
from tests.runs.work import pipelines as of_runs
from tests.support.clock import Clock


@dataclass
class Heard:
    """In the announcer's and the broker's place: keeps what a duty wants sent. `poison`: tasks that cannot be sent.
    `tries`: how often something was to be sent. `unconfirmed`: how many hints of each try the broker does not confirm.
    """

    tasks: list[UUID] = field(default_factory=list)
    connected: bool = True
    publishing: bool = True
    is_lost: bool = False
    unconfirmed: int = 0
    tries: int = 0
    poison: set[UUID] = field(default_factory=set)

    def announce(self, hints: Iterable[Announcement]) -> None:
        self.tasks.extend(one.hint.task_id for one in hints)

    async def publish(self, hints: Sequence[Announcement]) -> int:
        self.tries += 1
        if self.is_lost:
            raise ConnectionError("the broker went away")
        if self.poison & {one.hint.task_id for one in hints}:
            raise ValueError("a hint that cannot be encoded")
        self.announce(hints)
        return len(hints) - self.unconfirmed


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def announcer(heard: Heard) -> Announcer:
    return cast("Announcer", heard)


@pytest.fixture
async def pool(settings: Settings) -> AsyncIterator[Pool]:
    async with make_pool(settings, "test", 4) as pool:
        yield pool


# --- the relay


@pytest.fixture
def relay(pool: Pool, heard: Heard) -> Relay:
    found: Any = heard
    return Relay(pool, found, found)


async def late(rows: Rows) -> None:
    """The committers of all hints have died."""
    for table in ("outbox", "outbox_batch"):
        await rows.connection.execute(f"UPDATE {table} SET relay_at = clock_timestamp() - interval '10 ms'")


async def test_the_relay_sends_what_was_not_sent_in_its_time_and_sends_it_once(
    relay: Relay, heard: Heard, rows: Rows
) -> None:
    (told,) = await rows.submit()
    await rows.connection.execute("UPDATE outbox SET relay_at = clock_timestamp() + interval '1 hour'")
    await relay.turn()
    assert heard.tasks == []  # its committer has a second to do it
    await late(rows)
    for _ in range(2):
        assert await relay.turn() is None
    assert heard.tasks == [told.hint.task_id]  # on its way: not again before ten seconds


async def test_while_the_broker_is_away_the_relay_takes_nothing(relay: Relay, heard: Heard, rows: Rows) -> None:
    await rows.submit()
    await late(rows)
    before = await rows.connection.fetch("SELECT * FROM outbox")
    heard.connected = heard.publishing = False
    assert await relay.turn() is None
    assert await rows.connection.fetch("SELECT * FROM outbox") == before
    heard.connected = heard.publishing = True
    await relay.turn()
    assert len(heard.tasks) == 1


async def test_the_relay_sends_hints_also_while_a_queue_of_its_worker_cannot_be_consumed(
    relay: Relay, heard: Heard, rows: Rows
) -> None:
    """One queue without a leader would otherwise keep all hints of dead committers in the outbox."""
    (told,) = await rows.submit()
    await late(rows)
    heard.connected = False
    await relay.turn()
    assert heard.tasks == [told.hint.task_id]


async def test_after_a_full_batch_the_relay_goes_on_at_once(
    relay: Relay, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rest has been due for so long that a turn after a whole one does not read it."""
    monkeypatch.setattr(relaying, "_MAX_HINTS", 2)
    await rows.submit(count=3)
    await late(rows)
    assert [await relay.turn(), await relay.turn()] == [0.0, None]
    assert len(set(heard.tasks)) == 3
    relay._window.forget()
    await rows.connection.execute("DELETE FROM outbox")
    for _ in range(3):
        await rows.submit()
    await rows.connection.execute("UPDATE outbox SET relay_at = clock_timestamp() - interval '1 hour'")
    assert [await relay.turn(), await relay.turn()] == [0.0, None]
    assert len(set(heard.tasks)) == 6


async def test_a_turn_reads_only_what_became_due_since_the_turn_before(relay: Relay, heard: Heard, rows: Rows) -> None:
    """Under an old snapshot the outbox keeps all rows that have gone through it. Each minute one turn reads them."""
    await relay.turn()
    (told,) = await rows.submit()
    for table in ("outbox", "outbox_batch"):
        await rows.connection.execute(f"UPDATE {table} SET relay_at = clock_timestamp() - interval '1 hour'")
    await relay.turn()
    assert heard.tasks == []
    relay._window.forget()
    await relay.turn()
    assert heard.tasks == [told.hint.task_id]


async def test_hints_that_the_broker_did_not_confirm_are_not_sent_again_without_a_pause(
    relay: Relay, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "_MAX_HINTS", 2)
    sent = metrics.RELAYED._value.get()
    assert await relay.turn() is None
    assert metrics.RELAYED._value.get() == sent, "nothing was due"
    await rows.submit(count=4)
    await late(rows)
    heard.unconfirmed = 1
    assert await relay.turn() is None
    assert metrics.RELAYED._value.get() == sent + 1
    heard.unconfirmed = 0
    await late(rows)
    assert await relay.turn() == 0.0


async def test_a_broker_that_goes_away_meanwhile_is_no_fault_of_a_hint(relay: Relay, heard: Heard, rows: Rows) -> None:
    await rows.submit(count=3)
    await late(rows)
    heard.is_lost = True
    with pytest.raises(ConnectionError):
        await relay.turn()
    assert heard.tries == 1
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 3
    assert await rows.connection.fetchval("SELECT count(*) FROM quarantine") == 0


async def test_the_relay_sends_the_hints_of_a_submission_whose_committer_died_while_it_sent_them(
    relay: Relay, heard: Heard, rows: Rows
) -> None:
    """They are one row until the broker has confirmed all of them."""
    hints = await rows.submit(count=3)
    await rows.connection.execute("UPDATE outbox_batch SET relay_at = clock_timestamp() + interval '1 hour'")
    await outbox.delete_confirmed(rows.connection, hints[:2])
    assert await relay.turn() is None
    assert heard.tasks == []  # its committer has a second to do it
    await late(rows)
    for _ in range(2):
        assert await relay.turn() is None
    assert sorted(heard.tasks) == sorted(hint.hint.task_id for hint in hints)
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox_batch") == 0
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox") == 3  # until the broker has confirmed them


async def test_the_relay_sends_of_a_batch_only_the_hints_of_tasks_that_nobody_has_claimed(
    relay: Relay, heard: Heard, rows: Rows
) -> None:
    gone, taken, kept = await rows.submit(count=3)
    await claims.claim(rows.connection, rows.terms, [taken.hint.task_id])
    deletion = "DELETE FROM job WHERE id = (SELECT job_id FROM task WHERE id = $1)"
    await rows.connection.execute(deletion, gone.hint.task_id)
    await late(rows)
    await relay.turn()
    assert heard.tasks == [kept.hint.task_id]
    assert await rows.connection.fetchval("SELECT count(*) FROM outbox_batch") == 0


async def test_after_many_batches_the_relay_goes_on_at_once(
    relay: Relay, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "_MAX_SPLIT", 1)
    for _ in range(2):
        await rows.submit(count=2)
    await late(rows)
    assert [await relay.turn(), await relay.turn(), await relay.turn()] == [0.0, 0.0, None]
    assert len(set(heard.tasks)) == 4


async def test_a_hint_that_cannot_be_sent_delays_no_other_and_is_dropped_in_the_end(
    relay: Relay, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relaying, "STUCK_AFTER", 2)
    first, bad, last = await rows.submit(count=3)
    heard.poison = {bad.hint.task_id}
    await late(rows)
    sent = metrics.RELAYED._value.get()
    await relay.turn()
    assert metrics.RELAYED._value.get() == sent + 2
    assert sorted(heard.tasks) == sorted([first.hint.task_id, last.hint.task_id])
    kept = "SELECT count(*) FROM outbox WHERE task_id = $1"
    assert await rows.connection.fetchval(kept, bad.hint.task_id) == 1
    await late(rows)
    await relay.turn()
    assert await rows.connection.fetchval(kept, bad.hint.task_id) == 0
    assert (await rows.task(bad.hint.task_id))["status"] == "pending"  # a poll finds it


# --- the admitter


async def limited(rows: Rows, count: int, tenant: str = "t") -> list[jobs.NewJob]:
    made = [jobs.NewJob(ONE, tenant, limits=[ConcurrencyLimit(tenant, "k", 1)]) for _ in range(count)]
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, made)
    return made


async def ended(rows: Rows, job: jobs.NewJob) -> None:
    await jobs.request_cancel(rows.connection, [job.id], job.tenant_id, reason="r", by="b")


async def behind_others(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> UUID:
    """A job behind a whole batch of jobs that another limit holds back."""
    monkeypatch.setattr(concurrency.admission, "_MAX_BATCH", 2)
    wide, full = ConcurrencyLimit("t", "wide", 1), ConcurrencyLimit("t", "full", 0)
    made = [jobs.NewJob(ONE, "t", limits=limits) for limits in ([wide, full], [wide, full], [wide])]
    async with rows.connection.transaction():
        await jobs.submit(rows.connection, made)
    return made[-1].id


async def test_the_admitter_searches_behind_the_jobs_of_other_limits(
    pool: Pool, announcer: Announcer, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await behind_others(rows, monkeypatch)
    admitter = Admitter(pool, announcer)
    admitter.may_have_ended(free)
    await admitter.turn()
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [free]


async def test_the_admitter_lets_the_next_job_in_when_one_has_left(
    pool: Pool, announcer: Announcer, heard: Heard, rows: Rows
) -> None:
    first, second, _ = await limited(rows, 3)
    admitter = Admitter(pool, announcer)
    admitter.may_have_ended(first.id)
    await admitter.turn()
    (held,) = heard.tasks  # nobody had let one in before
    assert (await rows.task(held))["job_id"] == first.id
    admitter.may_have_ended(first.id)
    await admitter.turn()
    assert heard.tasks == [held]  # it has not ended
    await ended(rows, first)
    admitter.may_have_ended(first.id)
    await admitter.turn()
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [first.id, second.id]
    with pytest.raises(TimeoutError):  # nobody has left: it asks nothing
        await asyncio.wait_for(admitter.turn(), 0.1)


# --- the takeover


def takeover(settings: Settings, pool: Pool, announcer: Announcer) -> tuple[Leadership, Takeover]:
    leadership = Leadership(new_id(), 60.0)
    return leadership, Takeover(settings, pool, leadership, announcer)


async def test_only_the_leader_takes_over_and_it_announces_what_it_frees(
    settings: Settings, pool: Pool, announcer: Announcer, heard: Heard, rows: Rows
) -> None:
    leads, leader = takeover(settings, pool, announcer)
    follows, follower = takeover(settings, pool, announcer)
    await leader.turn()
    lease = (await rows.leased()).lease
    await rows.lapse(lease.task_id)
    await follower.turn()
    assert (bool(leads), bool(follows)) == (True, False)
    assert (await rows.task(lease.task_id))["status"] == "running"
    leader._hurry_until = float("inf")  # a worker has just died: it looks at every turn
    await leader.turn()
    assert (await rows.task(lease.task_id))["status"] == "pending"
    assert heard.tasks == [lease.task_id]


async def test_after_a_worker_has_died_each_turn_looks_for_its_leases_for_some_seconds(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of it may be locked at first."""
    dead: list[UUID] = []

    async def dead_workers(_connection: object) -> list[UUID]:
        return dead

    monkeypatch.setattr("leasehold.worker.maintenance.takeover.workers.dead", dead_workers)
    _, leader = takeover(settings.model_copy(update={"presence": True}), pool, announcer)
    assert await leader.turn() is None
    first, second = (await rows.leased()).lease, (await rows.leased()).lease
    assert await leader.turn() is None
    dead.append(first.owner)
    async with pool.acquire() as other, other.transaction():
        await other.execute("SELECT FROM task WHERE id = ANY($1) FOR UPDATE", [first.task_id, second.task_id])
        assert await leader.turn() is None
    assert leader.dead == (first.owner,)
    assert (await rows.task(first.task_id))["status"] == "running"
    assert await leader.turn() is None
    assert [(await rows.task(task))["status"] for task in (first.task_id, second.task_id)] == ["pending"] * 2

    leader._hurry_until = 0.0  # the seconds are over
    third = (await rows.leased()).lease
    assert third.owner == first.owner
    assert await leader.turn() is None
    assert (await rows.task(third.task_id))["status"] == "running", "the next look comes after the pause"


async def test_a_job_that_the_takeover_ends_is_counted_as_failed(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows
) -> None:
    """Nobody else counts it: its worker is lost."""
    _, leader = takeover(settings.model_copy(update={"max_losses": 0}), pool, announcer)
    await rows.lapse((await rows.leased()).lease.task_id)
    failed = JOBS.labels(ONE.name, "failed")
    before = failed.value
    await leader.turn()
    assert failed.value == before + 1


async def test_without_presence_nobody_is_asked_who_is_dead(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dead_workers(_connection: object) -> list[UUID]:
        raise AssertionError("asked")

    monkeypatch.setattr("leasehold.worker.maintenance.takeover.workers.dead", dead_workers)
    _, leader = takeover(settings.model_copy(update={"presence": False}), pool, announcer)
    lease = (await rows.leased()).lease
    await rows.lapse(lease.task_id)
    await leader.turn()
    assert (await rows.task(lease.task_id))["status"] == "pending"


# --- what the duties hand on


@pytest.fixture
def duties(settings: Settings, pool: Pool, announcer: Announcer) -> Duties:
    return duties_with(settings, pool, announcer)


def duties_with(settings: Settings, pool: Pool, announcer: Announcer) -> Duties:
    store = ObjectStore.from_settings(settings)
    return Duties(
        settings,
        Registration(new_id(), ["default"]),
        pool,
        store,
        announcer,
        Templates(of_runs()),
        None,
        (CONVERSION,),
        list[Hint]().extend,
    )


async def turn_of(duties: Duties, name: str) -> float | None:
    (duty,) = (one for one in duties.all() if one.name == name)
    return await duty._turn()


async def test_a_duty_of_the_leader_is_left_alone_by_those_that_do_not_lead(duties: Duties, rows: Rows) -> None:
    lease = (await rows.leased()).lease
    await rows.connection.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 s'")
    await turn_of(duties, "deadlines")
    assert (await rows.task(lease.task_id))["status"] == "running"
    await turn_of(duties, "takeover")
    await turn_of(duties, "deadlines")
    assert (await rows.task(lease.task_id))["status"] == "cancelled"


async def test_a_cancel_whose_grace_has_passed_is_ended(duties: Duties, rows: Rows) -> None:
    claimed = await rows.leased()
    await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")
    await turn_of(duties, "takeover")
    await turn_of(duties, "cancels")
    assert (await rows.job(claimed.job_id))["status"] == "cancel_requested"
    await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp() - interval '1 s'")
    await turn_of(duties, "cancels")
    assert (await rows.job(claimed.job_id))["status"] == "cancelled"


async def test_what_nobody_let_in_is_let_in_and_announced(duties: Duties, heard: Heard, rows: Rows) -> None:
    first, second = await limited(rows, 2)
    await turn_of(duties, "takeover")
    await turn_of(duties, "admissions")
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [first.id]
    await ended(rows, first)
    await turn_of(duties, "admissions")  # finds no further limit, and begins anew
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [first.id, second.id]


async def test_what_waits_behind_the_jobs_of_other_limits_is_let_in(
    duties: Duties, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = await behind_others(rows, monkeypatch)
    await turn_of(duties, "takeover")
    await turn_of(duties, "admissions")
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [free]


async def test_each_turn_goes_on_after_the_limits_of_the_turn_before(
    duties: Duties, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "with_waiting_jobs", partial(concurrency.with_waiting_jobs, page_size=1))
    first, second, _ = await limited(rows, 3, "t")
    of_next_limit, *_ = await limited(rows, 3, "u")
    await turn_of(duties, "takeover")
    for _ in range(2):
        await turn_of(duties, "admissions")
    await ended(rows, first)
    await turn_of(duties, "admissions")
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [first.id, of_next_limit.id, second.id]


@pytest.mark.parametrize("kind", ["result", "start"])
async def test_after_a_turn_that_was_full_of_workflows_or_of_their_runs_the_next_follows_at_once(
    duties: Duties, rows: Rows, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A workflow may start thousands of runs, and thousands of workflows may wait for theirs."""
    monkeypatch.setattr(all_duties, "_JOBS_AT_ONCE", 2)
    workflows, runs = [], []
    for _ in range(3):
        run, workflow = await rows.leased(), await rows.leased()
        call = Call("", 1, kind, "one", child=run.job_id)
        await settlements.suspend(rows.connection, [Suspending(workflow.lease, (call,), 0)])
        workflows.append(workflow.job_id)
        runs.append(run)
    if kind == "result":
        await settlements.complete(rows.connection, [Completion(run.lease) for run in runs])
    else:
        await jobs.request_cancel(rows.connection, workflows, "t", reason="r", by="b")
    await turn_of(duties, "takeover")
    assert [await turn_of(duties, children.DUTY) for _ in range(2)] == [0.0, None]
    if kind == "result":
        due = "SELECT count(*) FROM task WHERE job_id = ANY($1) AND available_at <= clock_timestamp()"
        assert await rows.connection.fetchval(due, workflows) == 3
    else:
        states = {(await rows.job(run.job_id))["status"] for run in runs}
        assert states == {"cancel_requested"}


async def test_the_duty_of_started_runs_takes_a_tenth_of_the_time_and_goes_on_at_once_while_calls_can_be_closed(
    settings: Settings, pool: Pool, announcer: Announcer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statements read all open calls of workflows: those of a million awaited runs take seconds."""
    clock = Clock()
    monkeypatch.setattr(all_duties, "Pauses", partial(Pauses, clock=clock))
    monkeypatch.setattr(all_duties, "monotonic", clock)
    duties = duties_with(settings.model_copy(update={"sweep_seconds": 60.0}), pool, announcer)
    await turn_of(duties, "takeover")
    began: list[float] = []
    seconds, has_more = 0.25, False

    async def close_calls(_connection: object) -> bool:
        began.append(clock.now)
        clock.now += seconds
        return has_more

    async def turns_within(passed: float) -> list[float]:
        """The pauses between the turns that did anything."""
        began.clear()
        until = clock.now + passed
        while clock.now < until:
            assert await turn_of(duties, children.DUTY) in (None, 0.0)
            clock.now += 0.5
        return [after - before - seconds for before, after in pairwise(began)]

    monkeypatch.setattr(children, "close_calls", close_calls)
    assert (await turns_within(10))[:3] == [0.5, 2.5, 2.5]
    seconds = 5.0
    assert (await turns_within(60))[-1] == 8.0
    seconds, has_more = 0.25, True
    clock.now += 10
    began.clear()
    assert [await turn_of(duties, children.DUTY) for _ in range(3)] == [0.0] * 3
    assert len(began) == 3


async def test_every_worker_fires_schedules_and_announces_their_runs(duties: Duties, heard: Heard, rows: Rows) -> None:
    row = {
        "id": new_id(), "tenant_id": "acme", "template": "scripted", "cron": SELDOM, "timezone": "UTC",
        "payload_template": {}, "scope": "tenant", "scope_id": "", "priority": 1, "overlap": "allow_all",
        "catch_up": "one", "catch_up_seconds": 3600, "next_run_at": datetime.now(UTC) - timedelta(seconds=1),
    }  # fmt: skip
    places = ", ".join(f"${n}" for n in range(1, len(row) + 1))
    await rows.connection.execute(f"INSERT INTO schedule ({', '.join(row)}) VALUES ({places})", *row.values())
    await turn_of(duties, "schedules")
    run = await rows.connection.fetchval("SELECT job_id FROM run WHERE schedule_id = $1", row["id"])
    assert [(await rows.task(task))["job_id"] for task in heard.tasks] == [run]


async def test_a_schedule_is_paused_after_as_many_refusals_as_the_installation_says(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows
) -> None:
    duties = duties_with(settings.model_copy(update={"schedule_failures_limit": 2}), pool, announcer)
    await rows.connection.execute(_DUE_SCHEDULES.format(n=1))
    await rows.connection.execute('UPDATE schedule SET payload_template = \'{"number": "x"}\'')
    for is_enabled in (True, False):
        await rows.connection.execute("UPDATE schedule SET next_run_at = clock_timestamp() - interval '1 s'")
        await turn_of(duties, "schedules")
        (row,) = await rows.connection.fetch("SELECT enabled, last_error ->> 'code' AS code FROM schedule")
        assert (row["enabled"], row["code"]) == (is_enabled, "invalid_payload")


_PERSON = (
    "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes, seen_at) SELECT gen_random_uuid(), 't',"
    " 'i', '{days}', '{days}', '', '{{}}', clock_timestamp() - interval '{days} days'"
)
_TOMBSTONE = (
    "INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because, at) SELECT gen_random_uuid(), 't', 'p',"
    " false, 'expired', clock_timestamp() - interval '{days} days'"
)
#: Duty -> the setting with the age of the rows that it deletes, its value for 40 days, the table, and an INSERT of a
#: row that is `{days}` old.
AGES = {
    "forget_people": ("people_days", 40, "person", _PERSON),
    "forget_tombstones": ("tombstone_hours", 40 * 24, "tombstone", _TOMBSTONE),
}


@pytest.mark.parametrize("duty", AGES)
async def test_rows_are_forgotten_when_they_are_as_old_as_the_installation_says(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows, duty: str
) -> None:
    setting, value, table, insert = AGES[duty]
    duties = duties_with(settings.model_copy(update={setting: value}), pool, announcer)
    for days in (39, 41):
        await rows.connection.execute(insert.format(days=days))
    await turn_of(duties, "takeover")
    await turn_of(duties, duty)
    assert await rows.connection.fetchval(f"SELECT count(*) FROM {table}") == 1


async def test_rows_of_the_audit_are_forgotten_when_they_are_as_old_as_the_installation_says(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows
) -> None:
    duties = duties_with(settings.model_copy(update={"audit_days": 40}), pool, announcer)
    for age in (41, 39):
        actor = Actor("key", "anna", "t", "abcdefghijkl", "192.0.2.7", "request-1")
        await audit.record(rows.connection, actor, "job.cancelled", Target("job", str(age), "t"))
        await rows.connection.execute(
            "UPDATE audit SET at = at - $2::interval WHERE target = $1", str(age), timedelta(days=age)
        )
    await turn_of(duties, "takeover")
    await turn_of(duties, "forget_audit")
    assert [row["target"] for row in await rows.connection.fetch("SELECT target FROM audit")] == ["39"]


async def test_tables_that_grow_get_new_statistics_within_about_two_seconds(duties: Duties, rows: Rows) -> None:
    (duty,) = (one for one in duties.all() if one.name == "statistics")
    assert duty._every == 2.0
    await rows.connection.execute("ALTER TABLE tombstone SET (autovacuum_enabled = off)")
    await rows.connection.execute(OLD_ROWS["forget_tombstones"][2].format(n=5000))
    await turn_of(duties, "takeover")
    await turn_of(duties, "statistics")
    counted = "SELECT reltuples FROM pg_class WHERE oid = 'tombstone'::regclass"
    assert await rows.connection.fetchval(counted) == 5000


#: The end of an INSERT of `{n}` rows.
_EACH = "FROM generate_series(1, {n}) AS row(n)"
_OLD = "clock_timestamp() - interval '2000 days' " + _EACH
#: Duty -> the table that it tidies, the most rows of one turn, and an INSERT of `{n}` old rows.
OLD_ROWS = {
    "forget_idempotency_keys": (
        "idempotency", 1000, "INSERT INTO idempotency (tenant_id, key, request_hash, locked_until, expires_at)"
        " SELECT 't', n::text, '', now(), " + _OLD,
    ),
    "forget_tombstones": (
        "tombstone", 5000, "INSERT INTO tombstone (job_id, tenant_id, pipeline, is_run, because, at)"
        " SELECT gen_random_uuid(), 't', 'p', false, 'expired', " + _OLD,
    ),
    "forget_downloads": (
        "download", 1000, "INSERT INTO download (id, tenant_id, key_prefix, bytes, lapses_at, started_at)"
        " SELECT gen_random_uuid(), 't', 'k', 1, now(), " + _OLD,
    ),
    "forget_rates": ("rate_bucket", 1000, "INSERT INTO rate_bucket (key, full_at) SELECT n::text, " + _OLD),
    "forget_quarantine": (
        "quarantine", 1000, "INSERT INTO quarantine (duty, unit, failures, error, failed_at, retry_at)"
        " SELECT 'leases', n::text, 1, '{{}}', now(), " + _OLD,
    ),
    "forget_people": (
        "person", 1000, "INSERT INTO person (id, tenant_id, issuer, subject, login, name, scopes, seen_at)"
        " SELECT gen_random_uuid(), 't', 'i', n::text, n::text, '', '{{}}', " + _OLD,
    ),
    "forget_gates": (
        "gate", 1000, "INSERT INTO gate (tenant_id, key, at_most, declared) SELECT 't', n::text, 1, false " + _EACH,
    ),
    "forget_expired_conversions": (
        "expired_conversion", 1000, "INSERT INTO expired_conversion (job_id, tenant_id, forgotten_at)"
        " SELECT gen_random_uuid(), 't', " + _OLD,
    ),
    "external_files": (
        "upload WHERE open", 1000, "INSERT INTO upload (key, tenant_id, open, exact, bytes, most, writable_until,"
        " look_at, forget_at, task_id, epoch) SELECT n::text, 't', true, true, 1, 1, now(), now(), now(),"
        " gen_random_uuid(), 1 " + _EACH,
    ),
}  # fmt: skip


@pytest.mark.parametrize("duty", OLD_ROWS)
async def test_housekeeping_goes_on_soon_after_a_full_batch_so_that_old_rows_do_not_pile_up(
    duties: Duties, rows: Rows, duty: str
) -> None:
    """More of them may come in a minute than a batch has."""
    table, batch, insert = OLD_ROWS[duty]
    await rows.connection.execute(insert.format(n=batch + 1))
    await turn_of(duties, "takeover")
    for pause, left in ((NEXT_BATCH_SECONDS, 1), (None, 0)):
        assert await turn_of(duties, duty) == pause
        assert await rows.connection.fetchval(f"SELECT count(*) FROM {table}") == left


#: Schedules that are due now, each with a run to make; they fire in one turn of a duty. `{n}`: their number.
_DUE_SCHEDULES = (
    "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority,"
    " overlap, catch_up, catch_up_seconds, next_run_at)"
    " SELECT gen_random_uuid(), 'acme', 'scripted', '0 0 1 1 *', 'UTC', '{{}}', 'tenant', '', 1, 'allow_all', 'one',"
    " 3600, clock_timestamp() " + _EACH
)


async def test_schedules_that_are_due_at_once_all_fire_without_a_pause(
    duties: Duties, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick that is more than a minute late is missed: with pauses, a worker fired a hundred schedules a second."""
    monkeypatch.setattr(firing, "_SECONDS_AT_ONCE", 600.0)
    await rows.connection.execute(_DUE_SCHEDULES.format(n=101))
    for pause, made in ((0.0, 100), (None, 101)):
        assert await turn_of(duties, "schedules") == pause
        assert await rows.connection.fetchval("SELECT count(*) FROM run") == made


async def test_the_runs_of_all_schedules_are_announced_although_an_admission_after_them_fails(
    duties: Duties, heard: Heard, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_arguments: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(concurrency, "admit", fails)
    await rows.connection.execute(_DUE_SCHEDULES.format(n=3))
    with pytest.raises(ConnectionResetError):
        await turn_of(duties, "schedules")
    made = {row["job_id"] for row in await rows.connection.fetch("SELECT job_id FROM run")}
    assert len(made) == 3
    assert {(await rows.task(task))["job_id"] for task in heard.tasks} == made


async def test_a_worker_pauses_while_others_fire_the_due_schedules(
    duties: Duties, rows: Rows, settings: Settings
) -> None:
    await rows.connection.execute(_DUE_SCHEDULES.format(n=100))
    async with connected(settings, "another worker") as another, another.transaction():
        await another.execute("SELECT FROM schedule FOR UPDATE")
        assert await turn_of(duties, "schedules") is None


async def test_jobs_past_their_deadline_all_end_without_a_pause(duties: Duties, rows: Rows) -> None:
    """Until its end is written, a job past its deadline may still begin."""
    await rows.submit(count=101)
    await rows.connection.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 second'")
    await turn_of(duties, "takeover")
    for pause, expired in ((0.0, 100), (None, 101)):
        assert await turn_of(duties, "deadlines") == pause
        assert await rows.connection.fetchval("SELECT count(*) FROM job WHERE status = 'expired'") == expired


async def test_cancels_whose_grace_has_passed_all_end_without_a_pause(duties: Duties, rows: Rows) -> None:
    await rows.submit(count=101)
    claimed = await claims.claim_due(rows.connection, rows.terms, ["default"], 101)
    await jobs.request_cancel(rows.connection, [one.job_id for one in claimed], "t", reason="r", by="b")
    await rows.connection.execute("UPDATE job SET cancel_by = clock_timestamp() - interval '1 second'")
    await turn_of(duties, "takeover")
    for pause, cancelled in ((0.0, 100), (None, 101)):
        assert await turn_of(duties, "cancels") == pause
        assert await rows.connection.fetchval("SELECT count(*) FROM job WHERE status = 'cancelled'") == cancelled


async def test_the_tasks_of_a_dead_worker_are_all_freed_without_a_pause(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows
) -> None:
    _, leader = takeover(settings, pool, announcer)
    await leader.turn()
    await rows.submit(count=201)
    await claims.claim_due(rows.connection, rows.terms, ["default"], 201)
    await rows.connection.execute("UPDATE task SET lease_until = clock_timestamp() - interval '1 minute'")
    leader._pauses.forget()  # the pause is over
    for pause, freed in ((0.0, 200), (None, 201)):
        assert await leader.turn() == pause
        assert await rows.connection.fetchval("SELECT count(*) FROM task WHERE status = 'pending'") == freed


async def test_the_ends_of_jobs_are_all_told_without_a_pause(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows
) -> None:
    """With pauses, a worker told of two hundred ends a second: where more jobs ended, some were never told of."""
    store = ObjectStore.from_settings(settings)
    templates = Templates(of_runs())
    registration = Registration(new_id(), ["default"])
    duties = Duties(settings, registration, pool, store, announcer, templates, deliveries, (), list[Hint]().extend)
    await rows.submit(count=101)
    await rows.connection.execute("UPDATE job SET status = 'cancelled', finished_at = clock_timestamp(), notify = true")
    for pause, left in ((0.0, 1), (None, 0)):
        assert await turn_of(duties, "webhooks") == pause
        assert await rows.connection.fetchval("SELECT count(*) FROM job WHERE notify") == left


async def test_a_worker_wakes_what_others_without_the_code_have_put_off_and_nothing_that_it_lacks_itself(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows
) -> None:
    """A worker whose handlers are not recorded, too: its duty goes on, and wakes nothing."""
    store, templates = ObjectStore.from_settings(settings), Templates(of_runs())
    put_off = [(await rows.leased()).lease for _ in range(2)]
    missing = ("one.only", "one.other")
    await settlements.snooze(
        rows.connection,
        [Snoozing(lease, 600.0, missing_handler=name) for lease, name in zip(put_off, missing, strict=True)],
    )
    for handlers, woken in ((None, []), (["one.only"], [put_off[0].task_id])):
        delivered: list[Hint] = []
        registration = Registration(new_id(), ["default"], handlers=handlers)
        duties = Duties(settings, registration, pool, store, announcer, templates, None, (), delivered.extend)
        await turn_of(duties, "unknown_tasks")
        assert [hint.task_id for hint in delivered] == woken
    due = await rows.connection.fetch("SELECT id FROM task WHERE available_at <= clock_timestamp()")
    assert [row["id"] for row in due] == [put_off[0].task_id]


@pytest.mark.parametrize(("pause", "drains", "writes"), [(0.0, False, True), (0.0, True, False), (30.0, False, False)])
async def test_a_worker_writes_its_schedules_again_when_their_last_writer_is_gone_unless_it_drains(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows, monkeypatch: pytest.MonkeyPatch,
    pause: float, drains: bool, writes: bool,
) -> None:  # fmt: skip
    """And not in each turn: it looks after a pause."""
    app = App("shop")

    @app.cron("@yearly")
    async def tidy() -> None: ...

    monkeypatch.setattr(all_duties, "_DECLARED_SECONDS", pause)
    registration = Registration(new_id(), ["default"])
    store, templates = ObjectStore.from_settings(settings), Templates(app.pipelines())
    duties = Duties(settings, registration, pool, store, announcer, templates, None, (), list[Hint]().extend)
    owner = "SELECT owner FROM leadership WHERE role = 'schedules of default shop'"
    await turn_of(duties, "schedules")
    assert await rows.connection.fetchval(owner) == registration.worker
    async with rows.connection.transaction():  # as an earlier release does that ended since
        await reconcile(rows.connection, "default", "shop", [], ended := new_id())
        await rows.connection.execute("UPDATE leadership SET until = clock_timestamp()")
    if drains:
        await registration.record_drain(pool)
    for _ in range(2):
        await turn_of(duties, "schedules")
    assert await rows.connection.fetchval("SELECT enabled FROM schedule") is writes
    assert await rows.connection.fetchval(owner) == (registration.worker if writes else ended)
    started = new_id()

    async def apps_to_take_over(*_: Any) -> list[str]:  # another worker starts after this one has looked
        await reconcile(rows.connection, "default", "shop", [], started)
        return ["shop"]

    monkeypatch.setattr("leasehold.schedules.declared.apps_to_take_over", apps_to_take_over)
    await turn_of(duties, "schedules")
    assert await rows.connection.fetchval(owner) == (started if writes else ended)


@pytest.mark.parametrize("own", ["a", ""])
async def test_a_worker_writes_no_schedules_of_a_tenant_that_lives_in_another_cell(
    settings: Settings, pool: Pool, announcer: Announcer, rows: Rows, tmp_path: Path, own: str
) -> None:
    """Else each tick would fire in both cells, once the tenant has moved and its rows here are deleted. An installation
    without cells has no map, and a map that cannot be read says nothing: the worker's duties go on.
    """
    app = App("shop")

    @app.cron("@yearly")
    async def tidy() -> None: ...

    path = tmp_path / "cells.json"
    cells = {name: f"https://{name}.example" for name in "ab"}
    path.write_bytes(orjson.dumps({"cells": cells, "tenants": {"default": "b"}}))
    store, templates = ObjectStore.from_settings(settings), Templates(app.pipelines())
    count = "SELECT count(*) FROM schedule"

    def duties_of(file: str) -> Duties:
        in_cell = settings.model_copy(update={"cell": own, "cells_file": file})
        registration = Registration(new_id(), ["default"])
        return Duties(in_cell, registration, pool, store, announcer, templates, None, (), list[Hint]().extend)

    duties = duties_of(str(path))
    for _ in range(2):
        await turn_of(duties, "schedules")
    assert await rows.connection.fetchval(count) == (0 if own else 1)
    new = path.with_suffix(".new")
    new.write_bytes(orjson.dumps({"cells": cells, "tenants": {"default": "a"}}))
    new.replace(path)
    await turn_of(duties, "schedules")  # it has moved here
    assert await rows.connection.fetchval(count) == 1
    await rows.connection.execute("DELETE FROM schedule")
    await turn_of(duties_of(str(tmp_path / "missing.json")), "schedules")
    assert await rows.connection.fetchval(count) == 1


async def test_no_duty_trusts_a_server_that_only_reads(settings: Settings) -> None:
    """A standby may lack the newest rows, and housekeeping would delete the objects of a job that was retried."""
    async with make_pool(settings, "tests", 1) as pool:
        connections = _shared(pool, 1)
        async with connections() as connection:
            await connection.execute("SET default_transaction_read_only = on")
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            async with connections():
                pytest.fail("the connection leads to a server that only reads")
        async with connections() as connection:  # a new one
            assert await connection.fetchval("SELECT current_setting('default_transaction_read_only')") == "off"
