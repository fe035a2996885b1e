"""No write without the lease: an owner or an epoch that is not the row's changes nothing, whatever the verb."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from leasehold.db.artifacts import note_of
from leasehold.domain.errors import LeaseLost
from leasehold.domain.lease import Lease
from leasehold.transitions import claims, notes, settlements
from leasehold.transitions.settlements import Completion, Failure, Output, Settled, Snoozing, Verdict
from tests.factories import Rows, assert_history, stale
from tests.transitions.conftest import Open

Settle = Callable[[Any, Lease], Awaitable[Settled]]
OUTPUT = Output("o.bin", "k/o.bin", 1, "00", "application/octet-stream")
SETTLEMENTS: dict[str, Settle] = {
    "complete": lambda c, lease: settlements.complete(c, [Completion(lease, [OUTPUT], {"x": 1})]),
    "fail": lambda c, lease: settlements.fail(c, [Failure(lease, "error", "boom", "it broke", True, 0.0)]),
    "wait_until": lambda c, lease: settlements.wait_until(c, [Snoozing(lease, 0.0, {"n": 1})]),
    "release": lambda c, lease: settlements.release(c, [lease]),
}
WRONG: dict[str, Callable[[Lease], Lease]] = {
    "an older epoch": lambda lease: stale(lease, epoch=lease.epoch - 1),
    "a later epoch": lambda lease: stale(lease, epoch=lease.epoch + 1),
    "another owner": lambda lease: stale(lease, owner=uuid4()),
    "an unknown task": lambda lease: stale(lease, task_id=uuid4()),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_settlement_with_a_wrong_lease_changes_nothing(rows: Rows, verb: str, wrong: str) -> None:
    claimed = await rows.leased()
    before = await rows.task(claimed.lease.task_id), await rows.job(claimed.job_id), await rows.events(claimed.job_id)
    lease = WRONG[wrong](claimed.lease)
    settled = await SETTLEMENTS[verb](rows.connection, lease)
    assert settled.verdicts == {lease.task_id: Verdict.LOST}
    assert settled.announcements == []
    after = await rows.task(claimed.lease.task_id), await rows.job(claimed.job_id), await rows.events(claimed.job_id)
    assert after == before
    assert await rows.connection.fetchval("SELECT count(*) FROM output") == 0
    assert await rows.connection.fetchval("SELECT count(*) FROM failure") == 0


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_note_with_a_wrong_lease_is_refused_and_not_written(rows: Rows, wrong: str) -> None:
    claimed = await rows.leased()
    with pytest.raises(LeaseLost):
        await notes.remember(rows.connection, WRONG[wrong](claimed.lease), {"n": 1})
    assert await rows.connection.fetchval("SELECT count(*) FROM note") == 0
    await notes.remember(rows.connection, claimed.lease, {"n": 1})
    await notes.remember(rows.connection, claimed.lease, {"n": 2})
    assert await note_of(rows.connection, claimed.lease.task_id) == {"n": 2}


async def test_a_note_written_while_the_task_is_taken_over_is_seen_or_refused(rows: Rows, another: Open) -> None:
    """The claim is under way: the note waits for it, and finds that the lease is lost."""
    claimed = await rows.leased()
    await rows.lapse(claimed.lease.task_id)
    successor = await another()
    async with successor.connection.transaction():
        await claims.claim(successor.connection, successor.terms, [claimed.lease.task_id])
        late = asyncio.create_task(notes.remember(rows.connection, claimed.lease, {"n": 1}))
        blocked = await another()
        async with asyncio.timeout(30):
            while not await blocked.connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await asyncio.sleep(0.01)
    with pytest.raises(LeaseLost):
        await late
    assert await note_of(successor.connection, claimed.lease.task_id) == {}


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_late_worker_cannot_settle_a_task_that_was_taken_over(rows: Rows, another: Open, verb: str) -> None:
    claimed = await rows.leased()
    await rows.lapse(claimed.lease.task_id)
    successor = await another()
    (taken,) = await claims.claim(successor.connection, successor.terms, [claimed.lease.task_id])
    assert (taken.was, taken.lease.epoch) == ("running", 2)
    settled = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    assert settled.verdicts[claimed.lease.task_id] is Verdict.LOST
    row = await rows.task(claimed.lease.task_id)
    assert (row["status"], row["epoch"], row["lease_owner"]) == ("running", 2, successor.terms.owner)


@pytest.mark.parametrize("verb", SETTLEMENTS)
async def test_a_settlement_whose_answer_was_lost_can_be_repeated(rows: Rows, verb: str) -> None:
    claimed = await rows.leased()
    first = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    events = await rows.events(claimed.job_id)
    again = await SETTLEMENTS[verb](rows.connection, claimed.lease)
    assert first.verdicts == again.verdicts == {claimed.lease.task_id: Verdict.SETTLED}
    assert again.announcements == []
    assert await rows.events(claimed.job_id) == events
    await assert_history(rows, claimed.job_id)


async def test_a_renewal_tells_what_was_lost_and_renews_the_rest(rows: Rows, another: Open) -> None:
    kept, lost = await rows.leased(), await rows.leased()
    await rows.lapse(lost.lease.task_id)
    successor = await another()
    await claims.claim(successor.connection, successor.terms, [lost.lease.task_id])
    before = (await rows.task(kept.lease.task_id))["lease_until"]
    answers = await claims.renew(rows.connection, rows.terms.owner, [kept.lease, lost.lease], 60.0)
    told = {answer.task_id: (answer.renewed, answer.is_valid) for answer in answers}
    assert told == {kept.lease.task_id: (True, True), lost.lease.task_id: (False, False)}
    assert (await rows.task(kept.lease.task_id))["lease_until"] > before


async def test_a_renewal_does_not_wait_for_a_row_that_is_being_settled(rows: Rows, another: Open) -> None:
    claimed = await rows.leased()
    other = await another()
    async with other.connection.transaction():
        await other.connection.execute("SELECT 1 FROM task WHERE id = $1 FOR UPDATE", claimed.lease.task_id)
        (answer,) = await claims.renew(rows.connection, rows.terms.owner, [claimed.lease], 60.0)
    assert (answer.renewed, answer.is_valid) == (False, True)
