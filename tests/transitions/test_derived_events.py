"""A job of one step that goes well writes no event, and its history has each event all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from leasehold.db import event_reads
from leasehold.domain.lease import Lease
from leasehold.transitions import claims, jobs, settlements, sweeps
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Part, Snoozing, Suspending
from tests.factories import DIAMOND, ONE, THREE, Rows, assert_history, stale, terms
from tests.transitions.conftest import Open

_LOST = 1  # the losses from which a task is not taken over any more


async def written(rows: Rows) -> int:
    """How many events have a row of their own."""
    count: int = await rows.connection.fetchval("SELECT count(*) FROM event")
    return count


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("by_poll", [True, False])
async def test_a_job_of_one_step_that_goes_well_writes_no_event_and_has_three(
    rows: Rows, is_last: bool, by_poll: bool
) -> None:
    if by_poll:
        await rows.submit()
        (claimed,) = await rows.claim_all()
    else:
        claimed = await rows.leased()
    await assert_history(rows, claimed.job_id)
    await settlements.complete(rows.connection, [Completion(claimed.lease, value={"x": 1}, is_last=is_last)])
    assert await written(rows) == 0
    await assert_history(rows, claimed.job_id)
    job, task = await rows.job(claimed.job_id), await rows.task(claimed.lease.task_id)
    common: dict[str, Any] = {"job_id": job["id"], "tenant_id": "t"}
    of_task: dict[str, Any] = {"task_id": task["id"], "step": "only", "epoch": 1}
    assert await rows.events(claimed.job_id) == [
        common | {"seq": 1, "at": job["created_at"], "kind": "submitted", "job_status": "queued", "task_id": None,
                  "step": None, "task_status": None, "epoch": None, "data": None},
        common | of_task | {"seq": 2, "at": task["started_at"], "kind": "claimed", "job_status": "running",
                            "task_status": "running", "data": {"worker": str(rows.terms.owner), "attempt": 1}},
        common | of_task | {"seq": 3, "at": task["finished_at"], "kind": "completed", "job_status": "succeeded",
                            "task_status": "succeeded", "data": None},
    ]  # fmt: skip


async def test_a_reader_goes_on_after_any_of_them_and_other_tenants_see_none(rows: Rows) -> None:
    claimed, _other_job = await rows.leased(), await rows.leased()
    await settlements.complete(rows.connection, [Completion(claimed.lease, is_last=True)])
    for after in range(4):
        events = await event_reads.events_after(rows.connection, "t", claimed.job_id, after, 10)
        assert [event.seq for event in events] == list(range(after + 1, 4))
    assert await event_reads.events_after(rows.connection, "another", claimed.job_id, 0, 10) == []


async def test_the_number_of_the_last_event_is_read_of_the_jobs_that_are_asked_for(rows: Rows) -> None:
    claimed, _not_asked_for, queued = await rows.leased(), await rows.leased(), uuid4()
    await rows.submit(id=queued)
    found = await event_reads.last_event_numbers(rows.connection, [claimed.job_id, queued, uuid4()])
    assert found == {claimed.job_id: 2, queued: 1}


async def test_jobs_of_one_statement_each_have_their_own(rows: Rows) -> None:
    """Some have one step, and some have several, of which a statement claims and completes two at once."""
    await rows.submit(count=3)
    await rows.submit(DIAMOND, count=2)
    await rows.submit(THREE)
    while claimed := await rows.claim_all():
        await settlements.complete(rows.connection, [Completion(lease.lease) for lease in claimed])
    for row in await rows.connection.fetch("SELECT id FROM job"):
        await assert_history(rows, row["id"])
    assert (
        await rows.connection.fetchval("SELECT count(*) FROM event JOIN job ON job.id = job_id WHERE pipeline = 'one'")
        == 0
    )


async def _take_over(rows: Rows, lease: Lease) -> None:
    await rows.lapse(lease.task_id)
    assert await claims.claim(rows.connection, terms(), [lease.task_id])


async def _claim_again(rows: Rows, lease: Lease) -> None:
    assert await claims.claim(rows.connection, rows.terms, [lease.task_id], reclaim=True)


async def _expire(rows: Rows, lease: Lease, losses: int) -> None:
    await rows.lapse(lease.task_id)
    await sweeps.expire_leases(rows.connection, [], losses)


async def _cancel(rows: Rows, lease: Lease) -> None:
    await _request_cancel(rows, lease)
    await settlements.acknowledge_cancel(rows.connection, [lease])


async def _request_cancel(rows: Rows, lease: Lease) -> None:
    job_id = (await rows.task(lease.task_id))["job_id"]
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")


async def _succeed_in_spite_of_a_cancel(rows: Rows, lease: Lease) -> None:
    await _request_cancel(rows, lease)
    await settlements.complete(rows.connection, [Completion(lease)])


async def _fail(rows: Rows, lease: Lease, *, retryable: bool = True) -> None:
    await settlements.fail(rows.connection, [Failure(lease, "error", "e", "m", retryable, 0.0)])


async def _end_overdue(rows: Rows, lease: Lease) -> None:
    await rows.connection.execute("UPDATE job SET deadline_at = clock_timestamp() - interval '1 second'")
    await rows.lapse(lease.task_id)
    await sweeps.expire_jobs(rows.connection)


#: All that can happen to a running step, but its completion.
ENDS: dict[str, Callable[[Rows, Lease], Awaitable[object]]] = {
    "it is retried": _fail,
    "it fails": lambda rows, lease: _fail(rows, lease, retryable=False),
    "it snoozes": lambda rows, lease: settlements.snooze(rows.connection, [Snoozing(lease, 0.0)]),
    "it waits as a workflow": lambda rows, lease: settlements.suspend(rows.connection, [Suspending(lease, (), 0)]),
    "it fans out": lambda rows, lease: settlements.fan_out(
        rows.connection, [FanningOut(lease, [Part("x", "default", 1, "one.only", 1)])]
    ),
    "its worker stops": lambda rows, lease: settlements.release(rows.connection, [lease]),
    "its worker is lost": lambda rows, lease: _expire(rows, lease, 5),
    "its worker is lost for the last time": lambda rows, lease: _expire(rows, lease, _LOST),
    "another worker takes it over": _take_over,
    "its worker claims it again": _claim_again,
    "it is cancelled": _cancel,
    "it succeeds in spite of a cancel": _succeed_in_spite_of_a_cancel,
    "its job takes too long": _end_overdue,
}


@pytest.mark.parametrize("end", ENDS)
async def test_whatever_becomes_of_a_claim_its_events_stay_as_clients_saw_them(rows: Rows, end: str) -> None:
    claimed = await rows.leased()
    seen = await rows.events(claimed.job_id)
    assert [event["kind"] for event in seen] == ["submitted", "claimed"]
    await ENDS[end](rows, claimed.lease)
    events = await rows.events(claimed.job_id)
    assert events[:2] == seen
    assert len(events) > len(seen)
    await assert_history(rows, claimed.job_id)
    while following := await rows.claim_all():
        await settlements.complete(rows.connection, [Completion(next_claim.lease) for next_claim in following])
        await assert_history(rows, claimed.job_id)
    assert (await rows.events(claimed.job_id))[: len(events)] == events


async def test_a_failed_job_that_is_replayed_has_one_history(rows: Rows) -> None:
    claimed = await rows.leased()
    await _fail(rows, claimed.lease, retryable=False)
    await jobs.replay(rows.connection, claimed.job_id, "t", from_step="only")
    (again,) = await rows.claim_all()
    await settlements.complete(rows.connection, [Completion(again.lease)])
    await assert_history(rows, claimed.job_id)
    kinds = [event["kind"] for event in await rows.events(claimed.job_id)]
    assert kinds == ["submitted", "claimed", "failed", "replayed", "claimed", "completed"]


#: What the release before writes of a task, beside its events: it knows none of the newer columns.
OLDER = {
    "complete": "UPDATE task SET status = 'succeeded', lease_owner = NULL, lease_until = NULL,"
    " finished_at = clock_timestamp() WHERE id = $1",
    "release": "UPDATE task SET status = 'pending', lease_owner = NULL, lease_until = NULL, attempt = attempt - 1"
    " WHERE id = $1",
    "take_over": "UPDATE task SET lease_owner = gen_random_uuid(), lease_until = clock_timestamp() + interval '30 s',"
    " epoch = epoch + 1, attempt = attempt + 1, losses = losses + 1, started_at = clock_timestamp() WHERE id = $1",
}  # fmt: skip


_CLAIM_ONCE_MORE = """
UPDATE task SET status = 'running', epoch = 2, lease_owner = gen_random_uuid(), lease_until = clock_timestamp(),
                started_at = clock_timestamp() WHERE id = $1
"""


@pytest.mark.parametrize("verb", OLDER)
async def test_a_worker_of_the_release_before_loses_no_event_of_a_claim(rows: Rows, verb: str) -> None:
    claimed = await rows.leased()
    seen = await rows.events(claimed.job_id)
    await rows.connection.execute(OLDER[verb], claimed.lease.task_id)
    assert await rows.events(claimed.job_id) == seen
    assert await written(rows) == 1


async def test_a_worker_of_the_release_before_loses_no_event_of_a_completion(rows: Rows) -> None:
    """It repeats the step, and its completion does not bring the first completion's event back."""
    claimed = await rows.leased()
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    seen = await rows.events(claimed.job_id)
    for statement in (
        "UPDATE task SET status = 'pending', finished_at = NULL WHERE id = $1",
        _CLAIM_ONCE_MORE,
        OLDER["complete"],
    ):
        await rows.connection.execute(statement, claimed.lease.task_id)
        assert await rows.events(claimed.job_id) == seen
    assert await written(rows) == 2


@pytest.mark.parametrize(("hours", "table"), [(23, "event"), (25, "kept_event")])
async def test_an_event_that_is_older_than_a_day_is_written_where_no_day_is_dropped(
    rows: Rows, hours: int, table: str
) -> None:
    """A sweeper may have searched its day already, and drop the day now."""
    claimed = await rows.leased()
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    await rows.connection.execute(
        "UPDATE task SET started_at = started_at - make_interval(hours => $1),"
        " finished_at = finished_at - make_interval(hours => $1)",
        hours,
    )
    seen = await rows.events(claimed.job_id)
    for statement in ("UPDATE task SET status = 'pending', finished_at = NULL WHERE id = $1", _CLAIM_ONCE_MORE):
        await rows.connection.execute(statement, claimed.lease.task_id)
        assert await rows.events(claimed.job_id) == seen
    assert [row["kind"] for row in await rows.connection.fetch(f"SELECT kind FROM {table} ORDER BY seq")] == [
        "claimed",
        "completed",
    ]


async def test_a_completion_that_comes_too_late_adds_nothing(rows: Rows) -> None:
    claimed = await rows.leased()
    await _take_over(rows, claimed.lease)
    seen = await rows.events(claimed.job_id)
    for late in (claimed.lease, stale(claimed.lease, owner=uuid4())):
        await settlements.complete(rows.connection, [Completion(late, is_last=True)])
    assert await rows.events(claimed.job_id) == seen


async def test_a_renewal_and_a_claim_at_once_leave_one_history(rows: Rows, another: Open) -> None:
    """A worker completes the step while its own heartbeat holds the row."""
    claimed = await rows.leased()
    heartbeat = (await another()).connection
    transaction = heartbeat.transaction()
    await transaction.start()
    await claims.renew(heartbeat, rows.terms.owner, [claimed.lease], 30.0)
    completing = asyncio.create_task(settlements.complete(rows.connection, [Completion(claimed.lease, is_last=True)]))
    await asyncio.sleep(0)
    await transaction.commit()
    await completing
    await assert_history(rows, claimed.job_id)
    assert await written(rows) == 0


async def test_readers_of_one_job_read_no_other(rows: Rows) -> None:
    await rows.submit(ONE, count=300)
    claimed = await rows.leased()
    await rows.connection.execute("ANALYZE job, task, event")
    of_a_row = "SELECT (SELECT e.at FROM history e WHERE e.job_id = j.id ORDER BY e.seq DESC LIMIT 1) FROM job j"
    for query in (
        "SELECT at FROM history WHERE job_id = $1 ORDER BY seq DESC LIMIT 1",
        "SELECT * FROM history WHERE job_id = $1 AND tenant_id = 't' AND seq > 0 ORDER BY seq LIMIT 100",
        f"{of_a_row} WHERE id = $1",
    ):
        plan = "\n".join(row[0] for row in await rows.connection.fetch("EXPLAIN " + query, claimed.job_id))
        assert "Seq Scan on job" not in plan, plan
        assert "Seq Scan on task" not in plan, plan
