"""The batcher of settlements: what ends together is settled together, each as it ended, and no answer is mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import asyncpg
import pytest

import leasehold.db.batcher
from leasehold.broker.outbox import Announcement
from leasehold.db.database import connect
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.exporter import jobs as counted
from leasehold.settings import Settings
from leasehold.transitions import claims, jobs, settlements
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Part, Snoozing, Suspending, Verdict
from leasehold.transitions.workflows.records import Call
from leasehold.worker.leases import settlement_batcher
from leasehold.worker.leases.settlement_batcher import (
    CancelAcknowledged,
    Release,
    Settlement,
    SettlementBatcher,
)
from tests.factories import ONE, THREE, Rows, assert_histories, stale
from tests.worker.conftest import SECONDS
from tests.worker.deaf import Deaf

Open = Callable[..., AbstractAsyncContextManager[SettlementBatcher]]


@pytest.fixture
def announced() -> list[Announcement]:
    return []


@pytest.fixture
def lost_answers() -> list[str]:
    """One entry for each time that the heartbeat hears of a lost answer."""
    return []


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The jobs that the worker counts as ended."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(
        settlement_batcher, "count_ended_jobs", lambda ends: found.extend((job.pipeline, job.outcome) for job in ends)
    )
    assert counted.count_ended_jobs is not vars(settlement_batcher)["count_ended_jobs"]
    return found


@pytest.fixture
def opened(settings: Settings, rows: Rows, announced: list[Announcement], lost_answers: list[str]) -> Open:
    """A batcher; `held`: what the worker's heartbeat knows to hold."""

    @asynccontextmanager
    async def batcher(*held: UUID) -> AsyncIterator[SettlementBatcher]:
        heartbeat: Any = SimpleNamespace(
            all_held=lambda: list(held), record_lost_answer=lambda: lost_answers.append("lost")
        )
        batcher = SettlementBatcher(settings, rows.terms, heartbeat, announced.extend, 64)
        try:
            yield batcher
        finally:
            await batcher.close()

    return batcher


async def settled(batcher: SettlementBatcher, *settlements: Settlement, return_exceptions: bool = False) -> Any:
    """All in one round trip: they wait when the batcher starts."""
    asked = [asyncio.create_task(batcher.settle(settlement)) for settlement in settlements]
    await asyncio.sleep(0)
    batcher.start()
    async with asyncio.timeout(SECONDS):
        return await asyncio.gather(*asked, return_exceptions=return_exceptions)


async def leased(rows: Rows, **columns: Any) -> Lease:
    return (await rows.leased(THREE, **columns)).lease


async def test_whatever_ends_together_is_settled_as_it_ended(
    opened: Open, rows: Rows, announced: list[Announcement], ended: list[tuple[str, str]]
) -> None:
    done, failed, snoozed, released, spread, cancelled, lost, last = [await leased(rows) for _ in range(8)]
    job = (await rows.task(cancelled.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")
    await rows.connection.execute("DELETE FROM outbox")
    async with opened() as batcher:
        answers = await settled(
            batcher,
            Failure(failed, "error", "e", "m", retryable=True, delay=60.0),
            Completion(done),
            CancelAcknowledged(cancelled),
            Release(released),
            Completion(stale(lost, epoch=lost.epoch - 1)),
            FanningOut(spread, [Part("x", "default", 1, "three.a", 1)]),
            Snoozing(snoozed, 60.0),
            Failure(last, "error", "e", "m", retryable=False, delay=0.0),
        )
    settled_as = ["retry", "succeeded", "cancelled", "pending", None, "blocked", "waiting", "failed"]
    assert [answer.state for answer in answers] == settled_as
    assert [answer.verdict for answer in answers] == [
        Verdict.LOST if state is None else Verdict.SETTLED for state in settled_as
    ]
    assert [answer.is_dead_letter for answer in answers] == [state == "failed" for state in settled_as]
    rows_say = [(await rows.task(lease.task_id))["status"] for lease in (failed, done, cancelled, released, lost)]
    assert rows_say == ["retry", "succeeded", "cancelled", "pending", "running"]
    written = await rows.connection.fetch("SELECT id, task_id FROM outbox")
    told = {hint.outbox_id: hint.hint.task_id for hint in announced}
    assert told.items() <= {row["id"]: row["task_id"] for row in written}.items()
    assert released.task_id in told.values()
    assert len(told) == 3  # what was released, the step after the completed one, and the part
    assert sorted(ended) == [("three", "cancelled"), ("three", "rejected")]
    await assert_histories(rows.connection)


@pytest.mark.parametrize("wrong", [Snoozing, FanningOut])
async def test_what_was_committed_before_postgresql_refused_another_settlement_is_announced_and_counted(
    opened: Open, rows: Rows, announced: list[Announcement], ended: list[tuple[str, str]], wrong: type[Settlement]
) -> None:
    """Each is settled again, alone, and PostgreSQL then names neither the hints nor the ends again."""
    done, last, released, refused = [await leased(rows) for _ in range(4)]
    await rows.connection.execute("DELETE FROM outbox")
    part = Part("x", "default", 1, "three.a", "\0")
    failing = Snoozing(refused, 60.0, note={"x": "\0"}) if wrong is Snoozing else FanningOut(refused, [part])
    async with opened() as batcher:
        completion, failure, release, error = await settled(
            batcher,
            Completion(done),
            Failure(last, "error", "e", "m", retryable=False, delay=0.0),
            Release(released),
            failing,
            return_exceptions=True,
        )
    assert isinstance(error, asyncpg.DataError)
    assert [answer.verdict for answer in (completion, failure, release)] == [Verdict.SETTLED] * 3
    following = await rows.connection.fetchval(
        "SELECT id FROM task WHERE job_id = (SELECT job_id FROM task WHERE id = $1) AND step = 'b'", done.task_id
    )
    assert sorted(hint.hint.task_id for hint in announced) == sorted([following, released.task_id])
    assert ended == [("three", "rejected")]
    await assert_histories(rows.connection)


async def test_a_job_that_somebody_has_locked_delays_the_settlement_of_no_other(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator has left a transaction open, or a handler commits its own late."""
    monkeypatch.setattr(leasehold.db.batcher, "_ALONE_SECONDS", 0.2)  # the batcher gives up before the connection does
    locked, free = [await leased(rows) for _ in range(2)]
    heartbeat: Any = SimpleNamespace(all_held=list, record_lost_answer=lambda: None)
    hasty = settings.model_copy(update={"database_timeout": 1.0})
    batcher = SettlementBatcher(hasty, rows.terms, heartbeat, lambda _hints: None, 64)
    other = await connect(settings, "test")
    try:
        async with other.transaction():
            job_id = (await rows.task(locked.task_id))["job_id"]
            await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", job_id)
            waiting, settling = [asyncio.create_task(batcher.settle(Completion(lease))) for lease in (locked, free)]
            await asyncio.sleep(0)
            batcher.start()
            async with asyncio.timeout(SECONDS):
                assert (await settling).state == "succeeded"
            assert not waiting.done()
            while not batcher._batcher._aside:
                await asyncio.sleep(0.02)
            sessions = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            assert await rows.connection.fetchval(sessions) == 0, "a statement that was given up waits on"
        async with asyncio.timeout(SECONDS):
            assert (await waiting).state == "succeeded"
    finally:
        await batcher.close()
        await other.close()


@pytest.mark.parametrize("lost_is_first", [True, False])
async def test_an_attempt_that_lost_its_task_and_the_same_workers_next_attempt_each_get_their_own_answer(
    opened: Open, rows: Rows, lost_is_first: bool
) -> None:
    """The worker claims the task again while the settlement of its lost attempt still waits for PostgreSQL."""
    lease = await leased(rows)
    lost, won = Completion(stale(lease, epoch=lease.epoch - 1), claim_next=True), Completion(lease, claim_next=True)
    async with opened() as batcher:
        answers = await settled(batcher, *([lost, won] if lost_is_first else [won, lost]))
    lost_answer, won_answer = answers if lost_is_first else reversed(answers)
    assert (lost_answer.verdict, lost_answer.state, lost_answer.next) == (Verdict.LOST, None, None)
    assert (won_answer.verdict, won_answer.state) == (Verdict.SETTLED, "succeeded")
    assert won_answer.next is not None
    await assert_histories(rows.connection)


@pytest.mark.parametrize("kind", [Completion, Release, CancelAcknowledged])
async def test_an_attempt_that_ended_in_a_job_that_is_being_cancelled_stops_it_however_it_ended(
    opened: Open, rows: Rows, ended: list[tuple[str, str]], kind: Callable[[Lease], Settlement]
) -> None:
    lease = await leased(rows)
    job = (await rows.task(lease.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job], "t", reason="r", by="b")
    async with opened() as batcher:
        (answer,) = await settled(batcher, kind(lease))
    assert answer.verdict is Verdict.SETTLED
    assert (await rows.job(job))["status"] == "cancelled"
    assert ended == [("three", "cancelled")]


@pytest.mark.parametrize(
    ("kind", "state", "due_in"),
    [
        (lambda lease: Suspending(lease, (), 0), "pending", 0),
        (Release, "pending", 0),
        (lambda lease: Failure(lease, "error", "e", "m", retryable=True, delay=60.0), "waiting", 60),
        (lambda lease: Snoozing(lease, 60.0), "waiting", 60),
        (lambda lease: Failure(lease, "error", "e", "m", retryable=False, delay=0.0), "cancelled", 0),
    ],
    ids=["suspends", "is released", "fails", "snoozes", "fails for good"],
)
async def test_a_workflow_that_had_not_heard_of_the_cancel_runs_again_to_see_it(
    opened: Open,
    rows: Rows,
    announced: list[Announcement],
    kind: Callable[[Lease], Settlement],
    state: str,
    due_in: int,
) -> None:
    claimed = await rows.leased(ONE)
    await settlements.suspend(rows.connection, [Suspending(claimed.lease, (), 0, delay=0.0)])
    (again,) = await rows.claim_all()
    await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")
    await rows.connection.execute("DELETE FROM outbox")
    async with opened() as batcher:
        (answer,) = await settled(batcher, kind(again.lease))
    assert (answer.verdict, answer.state) == (Verdict.SETTLED, state)
    job = await rows.job(claimed.job_id)
    assert job["status"] == ("cancelled" if state == "cancelled" else "cancel_requested")
    if state != "cancelled":
        seconds = await rows.connection.fetchval(
            "SELECT extract(epoch FROM available_at - clock_timestamp())::float8 FROM task WHERE id = $1",
            claimed.lease.task_id,
        )
        assert due_in - 30 < seconds <= due_in
        assert len(announced) == (state == "pending")
    await assert_histories(rows.connection)


async def test_a_workflow_that_was_returned_before_the_connection_was_lost_is_announced(
    opened: Open, rows: Rows, announced: list[Announcement], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repetition finds it due already, and PostgreSQL does not name its hint again."""
    workflows = [await rows.leased(ONE) for _ in range(2)]
    for workflow in workflows:
        await settlements.suspend(rows.connection, [Suspending(workflow.lease, (), 0, delay=0.0)])
    suspended, failed = sorted(await rows.claim_all(), key=lambda claimed: claimed.lease.task_id)
    for workflow in workflows:
        await jobs.request_cancel(rows.connection, [workflow.job_id], "t", reason="r", by="b")
    await rows.connection.execute("DELETE FROM outbox")
    snooze, tries = settlements.snooze, 0

    async def fails_once(*arguments: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ConnectionResetError
        return await snooze(*arguments)

    monkeypatch.setattr(settlements, "snooze", fails_once)
    async with opened() as batcher:
        answers = await settled(
            batcher,
            Suspending(suspended.lease, (), 0),
            Failure(failed.lease, "error", "e", "m", retryable=True, delay=60.0),
        )
    assert tries == 2
    assert [answer.state for answer in answers] == ["pending", "waiting"]
    assert [hint.hint.task_id for hint in announced] == [suspended.lease.task_id]
    await assert_histories(rows.connection)


async def test_what_was_lost_is_not_acknowledged_as_a_cancel(opened: Open, rows: Rows) -> None:
    lease = await leased(rows)
    async with opened() as batcher:
        (answer,) = await settled(batcher, CancelAcknowledged(lease))
    assert (answer.verdict, answer.state) == (Verdict.LOST, None)
    assert (await rows.task(lease.task_id))["status"] == "running"


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_completion_whose_answer_was_lost_still_hands_over_the_step_that_it_claimed(
    opened: Open, rows: Rows, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Else no worker runs it before its lease passes. But not if this worker runs it already."""
    lost: list[str] = []

    async def deaf(*arguments: Any) -> Any:
        return Deaf(await connect(*arguments), lost)

    monkeypatch.setattr(settlement_batcher, "connect", deaf)
    lease = await leased(rows)
    job = (await rows.task(lease.task_id))["job_id"]
    following = await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = 'b'", job)
    async with opened(*[following] if is_known else []) as batcher:
        (answer,) = await settled(batcher, Completion(lease, claim_next=True))
    assert len(lost) == 1
    assert (answer.verdict, answer.state) == (Verdict.SETTLED, "succeeded")
    row = await rows.task(following)
    assert (row["status"], row["lease_owner"]) == ("running", rows.terms.owner)
    if is_known:
        assert answer.next is None
        assert row["epoch"] == 1
    else:
        assert answer.next is not None
        assert (answer.next.lease.task_id, answer.next.lease.epoch, row["epoch"]) == (following, 2, 2)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_suspension_whose_answer_was_lost_still_hands_over_the_step_that_it_claimed(
    opened: Open, rows: Rows, monkeypatch: pytest.MonkeyPatch, lost_answers: list[str], cancelled: bool
) -> None:
    """Not in a run that is cancelled meanwhile: there the heartbeat ends the step."""
    lost: list[str] = []
    claimed = await rows.leased(ONE)

    async def cancel() -> None:
        if cancelled:
            await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="r", by="b")

    async def deaf(*arguments: Any) -> Any:
        return Deaf(await connect(*arguments), lost, cancel)

    monkeypatch.setattr(settlement_batcher, "connect", deaf)
    call = Call("", 1, "run", "child", child=new_id(), step="child#1", queue="default", max_attempts=1,
                handler="one.only", argument={"n": 1})  # fmt: skip
    async with opened() as batcher:
        (answer,) = await settled(batcher, Suspending(claimed.lease, (call,), 0, 1, step_to_claim=call.child))
    assert len(lost) == 1
    assert (answer.verdict, answer.state) == (Verdict.SETTLED, "waiting")
    assert lost_answers == ["lost"]
    if cancelled:
        assert answer.next is None
    else:
        assert answer.next is not None
        assert (answer.next.lease.task_id, answer.next.lease.epoch) == (call.child, 2)
        assert answer.next.params == {"n": 1}
    await assert_histories(rows.connection)


async def test_what_a_hint_has_claimed_is_not_claimed_again_for_a_completion_that_did_not_ask_to_go_on(
    opened: Open, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim's answer is on its way: the worker does not hold the step yet, and will run it."""
    lease = await leased(rows)
    job = (await rows.task(lease.task_id))["job_id"]
    following = await rows.connection.fetchval("SELECT id FROM task WHERE job_id = $1 AND step = 'b'", job)
    lost: list[str] = []

    async def deaf(*arguments: Any) -> Any:
        return Deaf(await connect(*arguments), lost, lambda: claims.claim(rows.connection, rows.terms, [following]))

    monkeypatch.setattr(settlement_batcher, "connect", deaf)
    async with opened() as batcher:
        (answer,) = await settled(batcher, Completion(lease))
    row = await rows.task(following)
    assert (len(lost), answer.next, row["status"], row["epoch"]) == (1, None, "running", 1)


async def test_a_completion_goes_on_only_if_it_was_asked_to(opened: Open, rows: Rows, lost_answers: list[str]) -> None:
    going, staying = await leased(rows), await leased(rows)
    async with opened() as batcher:
        answers = await settled(batcher, Completion(going, claim_next=True), Completion(staying))
    assert [answer.next is not None for answer in answers] == [True, False]
    assert answers[0].next is not None
    assert answers[0].next.lease.owner == rows.terms.owner
    assert lost_answers == []
