"""What a sweep leaves alone: what somebody else holds, what has not ended yet, and the places of its batch for those
that it may end.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.transitions import claims, jobs, quarantine, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Failure, Suspending
from leasehold.transitions.workflows import children
from leasehold.transitions.workflows.records import Call
from tests.factories import DIAMOND, THREE, Rows, assert_histories
from tests.security.poison import poison, set_aside
from tests.transitions.conftest import Open
from tests.transitions.test_claimable import set_task
from tests.transitions.test_workflows import suspended, wait

MAX_LOSSES = 5
HOUR = timedelta(hours=1)


async def cancel(rows: Rows, *job_ids: UUID) -> None:
    await jobs.request_cancel(rows.connection, job_ids, "t", reason="r", by="b")


async def set_job(rows: Rows, job_id: UUID, column: str, since: timedelta) -> None:
    """Set a time of the job to a time ago."""
    await rows.connection.execute(
        f"UPDATE job SET {column} = clock_timestamp() - $2::interval WHERE id = $1", job_id, since
    )


async def second_step(rows: Rows) -> Claimed:
    """The second step of a job, leased. The first one has succeeded."""
    first = await rows.leased(THREE)
    await settlements.complete(rows.connection, [Completion(first.lease)])
    (claimed,) = await rows.claim_all()
    return claimed


async def siblings(rows: Rows) -> tuple[Claimed, Claimed]:
    """Two steps of one job, leased."""
    top = await rows.leased(DIAMOND)
    await settlements.complete(rows.connection, [Completion(top.lease)])
    left, right = sorted(await rows.claim_all(), key=lambda claimed: claimed.step)
    return left, right


# --- what another transaction has locked


async def lost(rows: Rows) -> UUID:
    claimed = await rows.leased()
    await rows.lapse(claimed.lease.task_id)
    return claimed.job_id


async def late(rows: Rows) -> UUID:
    job_id = (await rows.leased()).job_id
    await set_job(rows, job_id, "deadline_at", HOUR)
    return job_id


async def cancelled(rows: Rows) -> UUID:
    job_id = (await rows.leased()).job_id
    await cancel(rows, job_id)
    await set_job(rows, job_id, "cancel_by", HOUR)
    return job_id


async def old(rows: Rows) -> UUID:
    claimed = await rows.leased()
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    await set_job(rows, claimed.job_id, "expires_at", HOUR)
    return claimed.job_id


#: A sweep, and what makes a job for it.
SWEEPS: dict[str, tuple[Callable[[Rows], Awaitable[UUID]], Callable[..., Awaitable[Any]]]] = {
    "leases": (lost, lambda connection, **limit: sweeps.expire_leases(connection, [], MAX_LOSSES, **limit)),
    "deadlines": (late, sweeps.expire_jobs),
    "cancels": (cancelled, lambda connection, **limit: sweeps.end_cancels(connection, [], MAX_LOSSES, **limit)),
}


async def states(rows: Rows) -> dict[UUID, Any]:
    """Each job's whole row."""
    return {row["id"]: row["row"] for row in await rows.connection.fetch("SELECT id, to_jsonb(job) AS row FROM job")}


@pytest.mark.parametrize("name", SWEEPS)
async def test_a_sweep_passes_over_a_job_that_another_transaction_has_locked(
    rows: Rows, another: Open, name: str
) -> None:
    """It waits for nothing, and it sets no job aside: the next sweep ends it. The locked job takes no place of a batch:
    many of them would end the sweep for all tenants.
    """
    make, sweep = SWEEPS[name]
    locked, free = await make(rows), await make(rows)
    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '1s'")
    before = await states(rows)
    async with other.transaction():
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", locked)
        await sweep(rows.connection, limit=1)
        after = await states(rows)
        assert {job_id for job_id in before if after[job_id] != before[job_id]} == {free}
    await sweep(rows.connection)
    assert (await states(rows))[locked] != before[locked]


@pytest.mark.parametrize("name", SWEEPS)
async def test_a_job_that_cannot_be_ended_is_set_aside_alone(rows: Rows, name: str) -> None:
    """Also if it comes after the others."""
    make, sweep = SWEEPS[name]
    good, bad = await make(rows), await make(rows)
    await poison(rows.connection, "job", f"{{row}}.id = '{bad}'")
    before = await states(rows)
    await sweep(rows.connection)
    after = await states(rows)
    assert {job_id for job_id in before if after[job_id] != before[job_id]} == {good}
    assert await set_aside(rows.connection, name) == {str(bad): 1}
    await sweep(rows.connection)
    assert await set_aside(rows.connection, name) == {str(bad): 1}


async def test_retention_passes_over_a_job_that_another_transaction_has_locked_or_that_is_set_aside(
    rows: Rows, another: Open
) -> None:
    locked, free, broken = [await old(rows) for _ in range(3)]
    await quarantine.set_aside(rows.connection, sweeps.RETENTION, broken, ValueError("its objects cannot be listed"))
    other = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '1s'")
    async with other.transaction():
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", locked)
        assert [job.job_id for job in await sweeps.forgettable_jobs(rows.connection)] == [free]


async def test_a_lease_that_its_worker_renews_meanwhile_is_not_ended(rows: Rows, another: Open) -> None:
    renewed, lapsed = await rows.leased(), await rows.leased()
    for claimed in (renewed, lapsed):
        await rows.lapse(claimed.lease.task_id)
    heartbeat = (await another()).connection
    await rows.connection.execute("SET lock_timeout = '1s'")
    async with heartbeat.transaction():
        await claims.renew(heartbeat, rows.terms.owner, [renewed.lease], 30.0)
        ended, hints, _ = await sweeps.expire_leases(rows.connection, [], MAX_LOSSES)
        assert (ended, [hint.hint.task_id for hint in hints]) == (1, [lapsed.lease.task_id])
        assert await rows.connection.fetchval("SELECT count(*) FROM quarantine") == 0
    assert (await sweeps.expire_leases(rows.connection, [], MAX_LOSSES))[0] == 0
    assert (await rows.task(renewed.lease.task_id))["status"] == "running"


async def test_a_lost_attempt_is_recorded_and_its_next_one_has_a_hint_unless_it_is_an_external_worker_s(
    rows: Rows,
) -> None:
    """External workers poll."""
    ours, external = (await rows.leased()).lease, (await rows.leased()).lease
    await set_task(rows, external.task_id, queue="ext:reports")
    for lease in (ours, external):
        await rows.lapse(lease.task_id)
    ended, hints, _ = await sweeps.expire_leases(rows.connection, [], MAX_LOSSES)
    assert (ended, [hint.hint.task_id for hint in hints]) == (2, [ours.task_id])
    failures = await rows.connection.fetch("SELECT task_id, epoch, cause, code, retryable FROM failure")
    assert {tuple(row) for row in failures} == {
        (lease.task_id, 1, "loss", "worker_lost", True) for lease in (ours, external)
    }


# --- the places of a batch


async def test_leases_that_last_take_no_place_among_those_that_have_ended(rows: Rows) -> None:
    for _ in range(3):
        await rows.leased()
    gone = await rows.leased()
    owner = uuid4()
    later = await rows.connection.fetchval("SELECT clock_timestamp() + $1::interval", HOUR)
    await set_task(rows, gone.lease.task_id, lease_owner=owner, lease_until=later)
    ended, hints, _ = await sweeps.expire_leases(rows.connection, [owner], MAX_LOSSES, limit=1)
    assert (ended, [hint.hint.task_id for hint in hints]) == (1, [gone.lease.task_id])


async def test_a_job_that_ended_in_time_takes_no_place_among_those_that_are_late(rows: Rows) -> None:
    in_time, is_late = await rows.leased(), await rows.leased()
    await settlements.complete(rows.connection, [Completion(in_time.lease)])
    await set_job(rows, in_time.job_id, "deadline_at", 2 * HOUR)
    await set_job(rows, is_late.job_id, "deadline_at", HOUR)
    assert [one.outcome for one in await sweeps.expire_jobs(rows.connection, limit=1)] == ["expired"]
    assert (await rows.job(in_time.job_id))["status"] == "succeeded"


async def test_a_cancelled_job_of_which_nothing_may_end_yet_takes_no_place_among_the_others(rows: Rows) -> None:
    """Its steps must not be interrupted, or its grace lasts. The batch takes the earliest grace first."""
    uninterrupted, attentive, gone = await second_step(rows), await rows.leased(), await rows.leased()
    workflow = await suspended(rows, wait(1))
    graces = ((uninterrupted, HOUR), (attentive, -HOUR), (workflow, -2 * HOUR), (gone, -3 * HOUR))
    await cancel(rows, *[claimed.job_id for claimed, _ in graces])
    for claimed, since in graces:
        await set_job(rows, claimed.job_id, "cancel_by", since)
    await set_task(rows, uninterrupted.lease.task_id, cancelable=False)
    await rows.lapse(gone.lease.task_id)
    assert [one.outcome for one in await sweeps.end_cancels(rows.connection, [], MAX_LOSSES, limit=1)] == ["cancelled"]
    unchanged = [(await rows.job(claimed.job_id))["status"] for claimed in (uninterrupted, attentive, workflow)]
    assert unchanged == ["cancel_requested"] * 3


# --- each job by its own state


async def test_of_many_cancelled_jobs_each_step_ends_by_the_state_of_its_own_job(rows: Rows) -> None:
    """Some have passed their grace, some have lost a worker. A job that nobody has cancelled is none of them."""
    unstoppable, stoppable = await siblings(rows)
    living, orphan = await siblings(rows)
    too_late, in_time, bystander = [await rows.leased() for _ in range(3)]
    await cancel(rows, unstoppable.job_id, living.job_id, too_late.job_id, in_time.job_id)
    for job_id in (unstoppable.job_id, too_late.job_id):
        await set_job(rows, job_id, "cancel_by", HOUR)
    await set_task(rows, unstoppable.lease.task_id, cancelable=False)
    for workflow in (living, too_late, in_time):
        await set_task(rows, workflow.lease.task_id, journaled=True)
    for claimed in (orphan, too_late, in_time, bystander):
        await rows.lapse(claimed.lease.task_id)
    await rows.connection.execute("DELETE FROM outbox")
    assert [one.outcome for one in await sweeps.end_cancels(rows.connection, [], MAX_LOSSES)] == ["cancelled"]
    everyone = {
        "unstoppable": unstoppable, "stoppable": stoppable, "living": living, "orphan": orphan,
        "too late": too_late, "in time": in_time, "bystander": bystander,
    }  # fmt: skip
    tasks = {name: await rows.task(claimed.lease.task_id) for name, claimed in everyone.items()}
    assert {name: (task["status"], task["losses"]) for name, task in tasks.items()} == {
        "unstoppable": ("running", 0), "stoppable": ("cancelled", 0), "living": ("running", 0),
        "orphan": ("cancelled", 0), "too late": ("cancelled", 0), "in time": ("pending", 1),
        "bystander": ("running", 0),
    }  # fmt: skip
    hints = await rows.connection.fetch("SELECT task_id, relay_at <= clock_timestamp() AS is_due FROM outbox")
    assert [tuple(hint) for hint in hints] == [(in_time.lease.task_id, True)]
    await assert_histories(rows.connection)


async def test_a_job_that_is_late_says_whether_it_ever_started(rows: Rows) -> None:
    """Only one that waits at its limits, and may wait for so long, has not started in time."""
    expected = {}
    for is_held, may_wait in ((True, True), (True, False), (False, True)):
        async with rows.connection.transaction():
            await rows.submit(limits=[ConcurrencyLimit("t", "k", at_most=0)] if is_held else [])
        code = "not_started_in_time" if is_held and may_wait else "deadline_exceeded"
        job_id = await rows.connection.fetchval(
            "UPDATE job SET start_within_seconds = $1, deadline_at = now() - interval '1 s'"
            " WHERE deadline_at IS NULL RETURNING id",
            60 if may_wait else None,
        )
        expected[job_id] = code
    assert len(await sweeps.expire_jobs(rows.connection)) == 3
    assert {job_id: (await rows.job(job_id))["error"]["code"] for job_id in expected} == expected


async def test_a_run_is_kept_while_an_unfinished_workflow_awaits_or_may_await_its_result_and_no_other_is(
    rows: Rows,
) -> None:
    """Other workflows have read the result already, started a detached run, or ended. The duty that closes calls has
    come meanwhile.
    """

    async def run_of(kind: str, state: str = "open", *, has_ended: bool = False, reads: str = "") -> UUID:
        child, workflow = await rows.leased(keep_seconds=0), await rows.leased()
        calls = [Call("", 1, kind, "one", state, child=child.job_id)]
        if reads:
            calls.append(Call("", 2, "result", "one", child=child.job_id))
        await settlements.suspend(rows.connection, [Suspending(workflow.lease, tuple(calls), 0, None, 0.0)])
        if reads == "failed":
            await settlements.fail(rows.connection, [Failure(child.lease, "error", "bad", "no", False, 60.0)])
        else:
            await settlements.complete(rows.connection, [Completion(child.lease)])
        (again,) = await rows.claim_all()
        if reads:
            end = Call("", 2, "result", "one", reads, {"value": 1})
            await settlements.suspend(rows.connection, [Suspending(again.lease, (end,), 0, None, None)])
        if has_ended:
            await settlements.complete(rows.connection, [Completion(again.lease)])
        return child.job_id

    kept = {await run_of("result"), await run_of("start")}
    others = {await run_of("result", "done"), await run_of("start", "done")}
    others |= {await run_of("start", reads=state) for state in ("done", "failed")}
    others |= {await run_of(kind, has_ended=True) for kind in ("start", "result")}
    for _ in range(2):
        assert {job.job_id for job in await sweeps.forgettable_jobs(rows.connection)} == others
        await children.close_calls(rows.connection)
    assert kept.isdisjoint(others)


async def test_retention_says_whether_more_keys_may_be_due(rows: Rows) -> None:
    await rows.connection.execute(
        "INSERT INTO idempotency (tenant_id, key, request_hash, locked_until, expires_at)"
        " SELECT 't', n::text, '', now(), now() + (n - 2.5) * interval '1 hour' FROM generate_series(1, 3) AS n"
    )
    assert await sweeps.forget_idempotency_keys(rows.connection, 1)
    assert [row["key"] for row in await rows.connection.fetch("SELECT key FROM idempotency ORDER BY key")] == ["2", "3"]
    assert not await sweeps.forget_idempotency_keys(rows.connection, 2)
    assert [row["key"] for row in await rows.connection.fetch("SELECT key FROM idempotency ORDER BY key")] == ["3"]
