"""Which ended jobs are deleted, what their tombstones say, and which jobs wait for something first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.transitions import concurrency, jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import RunOf
from leasehold.transitions.settlements import Completion, Failure, Suspending
from leasehold.transitions.workflows.records import Call
from tests.factories import Rows

RUN = RunOf("template", 1, "scope", "1")


async def succeed(rows: Rows, *claimed: Claimed) -> None:
    await settlements.complete(rows.connection, [Completion(one.lease) for one in claimed])


async def fail(rows: Rows, *claimed: Claimed) -> None:
    failures = [Failure(one.lease, "error", "bad", "no", False, 0.0) for one in claimed]
    await settlements.fail(rows.connection, failures)


async def tombstones(rows: Rows) -> dict[UUID, tuple[Any, ...]]:
    found = await rows.connection.fetch("SELECT job_id, tenant_id, pipeline, is_run, because FROM tombstone")
    return {row["job_id"]: tuple(row)[1:] for row in found}


async def forgotten(rows: Rows, job_ids: Sequence[UUID]) -> set[UUID]:
    """Those of the jobs that retention finds, and deletes. It deletes no other, though it is asked to."""
    found = {job.job_id for job in await sweeps.forgettable_jobs(rows.connection)}
    await sweeps.forget_jobs(rows.connection, job_ids)
    left = {row["id"] for row in await rows.connection.fetch("SELECT id FROM job")}
    assert found == set(job_ids) - left
    return found


async def test_the_tombstone_of_a_job_says_what_it_was_and_why_it_is_gone(rows: Rows) -> None:
    run, plain = await rows.leased(run=RUN), await rows.leased()
    hurried, old = await rows.leased(), await rows.leased(keep_seconds=0)
    await jobs.expire_early(rows.connection, hurried.job_id, "t")
    await succeed(rows, run, plain, hurried, old)
    await rows.connection.execute("UPDATE job SET keep_seconds = 1 WHERE id = $1", old.job_id)
    for one in (run, plain):
        assert await jobs.delete(rows.connection, one.job_id, "t") == one.output_prefix
        assert await jobs.delete(rows.connection, one.job_id, "t") == one.output_prefix  # once more: nothing changes
    deleted = {one.job_id: ("t", "one", one is run, "deleted") for one in (run, plain)}
    assert await tombstones(rows) == deleted
    everyone = [one.job_id for one in (run, plain, hurried, old)]
    assert await forgotten(rows, everyone) == set(everyone)
    others = {hurried.job_id: ("t", "one", False, "deleted"), old.job_id: ("t", "one", False, "expired")}
    assert await tombstones(rows) == deleted | others


async def test_a_deleted_job_whose_first_tombstone_is_gone_has_been_deleted_all_the_same(rows: Rows) -> None:
    claimed = await rows.leased()
    await succeed(rows, claimed)
    await jobs.delete(rows.connection, claimed.job_id, "t")
    await jobs.forget_tombstones(rows.connection, 0)
    assert await tombstones(rows) == {}
    await sweeps.forget_jobs(rows.connection, [claimed.job_id])
    assert await tombstones(rows) == {claimed.job_id: ("t", "one", False, "deleted")}


async def test_a_job_that_has_not_ended_is_deleted_at_its_end(rows: Rows) -> None:
    claimed, other = await rows.leased(), await rows.leased()
    assert await jobs.expire_early(rows.connection, claimed.job_id, "t") is None
    assert await forgotten(rows, [claimed.job_id, other.job_id]) == set()
    await succeed(rows, claimed, other)
    assert await forgotten(rows, [claimed.job_id, other.job_id]) == {claimed.job_id}


@pytest.mark.parametrize("failing", [False, True])
@pytest.mark.parametrize("kind", ["start", "result"])
async def test_only_a_workflow_that_failed_waits_for_the_cancel_of_the_runs_that_it_started(
    rows: Rows, kind: str, failing: bool
) -> None:
    """One that succeeded leaves them. No other job waits for them, nor does one that only awaited their results."""
    child = await rows.leased()
    workflow, other = [await rows.leased(keep_seconds=0) for _ in range(2)]
    call = Call("", 1, kind, "one", child=child.job_id)
    await settlements.suspend(rows.connection, [Suspending(workflow.lease, (call,), 0, None, 0.0)])
    (again,) = await rows.claim_all()
    await fail(rows, other)
    await (fail if failing else succeed)(rows, again)
    gone = await forgotten(rows, [workflow.job_id, other.job_id])
    stays = failing and kind == "start"
    assert gone == {other.job_id} | (set() if stays else {workflow.job_id})


@pytest.mark.parametrize(("hours", "goes"), [(1, False), (23, False), (25, True)])
async def test_a_job_whose_end_is_not_reported_is_kept_for_a_day(rows: Rows, hours: int, goes: bool) -> None:
    unreported, plain = await rows.leased(notify=True), await rows.leased()
    await succeed(rows, unreported, plain)
    await rows.connection.execute(
        "UPDATE job SET expires_at = clock_timestamp() - make_interval(hours => $1), finished_at = created_at", hours
    )
    gone = await forgotten(rows, [unreported.job_id, plain.job_id])
    assert gone == {plain.job_id} | ({unreported.job_id} if goes else set())


async def test_a_job_waits_for_the_rate_at_which_it_counts_and_for_that_of_no_other_tenant(rows: Rows) -> None:
    everyone = {}
    for tenant, rate in (("t", None), ("other", 10)):
        limit = ConcurrencyLimit(tenant, "k", at_most=5, per_minute=rate)
        await rows.submit(tenant=tenant, limits=[limit], keep_seconds=0)
        await concurrency.admit(rows.connection, [(tenant, "k")])
        (claimed,) = await rows.claim_all()
        await succeed(rows, claimed)
        everyone[tenant] = claimed.job_id
    assert await forgotten(rows, [*everyone.values()]) == {everyone["t"]}


async def test_retention_goes_on_from_a_time_in_the_order_in_which_jobs_expired(rows: Rows) -> None:
    """Those of that very moment are among them: a batch may have ended between two of them."""
    everyone = [await rows.leased() for _ in range(4)]
    await succeed(rows, *everyone)
    for hours, claimed in zip((1, 2, 2, 3), everyone, strict=True):
        await rows.connection.execute(
            "UPDATE job SET expires_at = date_trunc('hour', clock_timestamp()) - make_interval(hours => $2)"
            " WHERE id = $1",
            claimed.job_id,
            hours,
        )
    last, *middle, first = [one.job_id for one in everyone]
    found = await sweeps.forgettable_jobs(rows.connection)
    assert [found[0].job_id, {one.job_id for one in found[1:3]}, found[3].job_id] == [first, {*middle}, last]
    later = await sweeps.forgettable_jobs(rows.connection, since=found[1].expires_at)
    assert ({one.job_id for one in later[:2]}, [one.job_id for one in later[2:]]) == ({*middle}, [last])
