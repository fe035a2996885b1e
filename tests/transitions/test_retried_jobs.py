"""What a job has that is retried: its time, its attempts, its place, its messages; and what a workflow knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.domain.pipeline import Pipeline, RunTerms, SkipIf, Step
from leasehold.transitions import claims, concurrency, jobs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.jobs import AdmissionTerms, RunOf
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Part, Suspending
from leasehold.transitions.workflows import reading, recording
from leasehold.transitions.workflows.records import Call, Recording
from tests.factories import DIAMOND, THREE, Rows, assert_histories, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_twins import failed
from tests.transitions.test_workflows import children, step, suspended

LIMIT = ConcurrencyLimit("t", "k", at_most=1)
RUN = RunOf("template", 1, "scope", "1")


async def fail(rows: Rows, *claimed: Claimed) -> None:
    failures = [Failure(one.lease, "error", "bad", "no", False, 0.0) for one in claimed]
    await settlements.fail(rows.connection, failures)


async def an_error(rows: Rows, claimed: Claimed) -> None:
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "flaky", "again", True, 0.0)])


async def a_crash(rows: Rows, claimed: Claimed) -> None:
    await settlements.fail(rows.connection, [Failure(claimed.lease, "crash", "child_crashed", "SIGSEGV", True, 0.0)])


async def a_loss(rows: Rows, claimed: Claimed) -> None:
    await rows.lapse(claimed.lease.task_id)
    await sweeps.expire_leases(rows.connection, [], 2)


@pytest.mark.parametrize(("happens", "attempts"), [(an_error, 3), (a_crash, 2), (a_loss, 3)])
async def test_a_retried_step_has_all_its_attempts_again(
    rows: Rows, happens: Callable[[Rows, Claimed], Awaitable[None]], attempts: int
) -> None:
    claimed = await rows.leased()
    for _ in range(2):
        for left in reversed(range(attempts)):
            await happens(rows, claimed)
            assert (await rows.job(claimed.job_id))["status"] == ("running" if left else "failed")
            if left:
                (claimed,) = await rows.claim_all()
        assert len(await jobs.replay(rows.connection, claimed.job_id, "t") or []) == 1
        assert (await rows.job(claimed.job_id))["status"] == "queued"
        (claimed,) = await rows.claim_all()
    await assert_history(rows, claimed.job_id)


async def test_a_job_that_is_retried_twice_without_a_limit_is_due_each_time(rows: Rows) -> None:
    claimed = await rows.leased(THREE)
    for _ in range(3):
        await fail(rows, claimed)
        await jobs.replay(rows.connection, claimed.job_id, "t")
        assert await rows.statuses(claimed.job_id) == {"a": "pending", "b": "blocked", "c": "blocked"}
        (claimed,) = await rows.claim_all()
    assert not claimed.gated


async def test_a_job_that_is_retried_at_its_first_limit_counts_there_and_waits_for_its_other_steps(rows: Rows) -> None:
    claimed = await rows.leased(DIAMOND)
    await fail(rows, claimed)
    assert await jobs.replay(rows.connection, claimed.job_id, "t", terms=AdmissionTerms([LIMIT])) == []
    assert (await rows.job(claimed.job_id))["status"] == "pending"
    await assert_history(rows, claimed.job_id)
    await concurrency.admit(rows.connection, [("t", "k")])
    for expected in (["top"], ["left", "right"], ["bottom"]):
        steps = await rows.claim_all()
        assert sorted(one.step for one in steps) == expected
        assert all(one.gated for one in steps)
        await settlements.complete(rows.connection, [Completion(one.lease) for one in steps])
    assert (await rows.job(claimed.job_id))["status"] == "succeeded"
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize("limited", [False, True])
async def test_a_retried_job_takes_the_new_exclusive_key_or_keeps_its_own(rows: Rows, limited: bool) -> None:
    kept, changed = [await rows.leased(exclusive_key=key) for key in ("kept", "old")]
    await fail(rows, kept, changed)
    await jobs.replay(rows.connection, kept.job_id, "t")
    terms = AdmissionTerms([LIMIT] if limited else [], "new")
    await jobs.replay(rows.connection, changed.job_id, "t", terms=terms)
    keys = [(await rows.job(one.job_id))["exclusive_key"] for one in (kept, changed)]
    assert keys == ["kept", "new"]


OUTSIDE = Pipeline(
    "outside",
    module="tests.factories",
    steps=[Step("first", external=True), Step("second", needs=("first",))],
)
THEN_OUTSIDE = Pipeline(
    "then_outside",
    module="tests.factories",
    steps=[Step("first"), Step("second", needs=("first",), external=True)],
)


async def test_a_step_of_an_external_worker_that_is_retried_waits_for_it_without_a_hint(rows: Rows) -> None:
    await rows.submit(OUTSIDE)
    queue = await rows.connection.fetchval("SELECT queue FROM task WHERE step = 'first'")
    (claimed,) = await claims.claim_due(rows.connection, rows.terms, [queue], 1)
    await fail(rows, claimed)
    assert await jobs.replay(rows.connection, claimed.job_id, "t") == []
    assert (await rows.job(claimed.job_id))["status"] == "waiting_worker"
    await assert_history(rows, claimed.job_id)


async def test_a_retried_job_at_a_limit_waits_for_no_external_worker_whose_step_comes_later(rows: Rows) -> None:
    claimed = await rows.leased(THEN_OUTSIDE)
    await fail(rows, claimed)
    await jobs.replay(rows.connection, claimed.job_id, "t", terms=AdmissionTerms([LIMIT]))
    assert (await rows.job(claimed.job_id))["status"] == "pending"


async def leased_run(rows: Rows, **columns: Any) -> Claimed:
    await rows.submit(run=RUN, **columns)
    (claimed,) = await rows.claim_all()
    return claimed


async def remaining(rows: Rows, job_id: UUID) -> timedelta:
    deadline: datetime = (await rows.job(job_id))["deadline_at"]
    return deadline - datetime.now(UTC)


async def test_a_retried_job_has_as_much_time_as_at_its_submission_or_at_its_last_retry(rows: Rows) -> None:
    """Whenever other jobs were submitted and retried. The first life began two hours ago, the second one hour ago."""
    other = await leased_run(rows, not_before=datetime.now(UTC) - timedelta(days=1))
    await fail(rows, other)
    claimed = await rows.leased(deadline_at=datetime.now(UTC) + timedelta(hours=10))
    await rows.connection.execute("UPDATE job SET created_at = created_at - interval '2 hours'")
    await jobs.replay(rows.connection, other.job_id, "t")
    await fail(rows, claimed)
    await jobs.replay(rows.connection, claimed.job_id, "t")
    assert round(await remaining(rows, claimed.job_id) / timedelta(hours=1)) == 12
    await rows.connection.execute("UPDATE event SET at = at - interval '1 hour' WHERE job_id = $1", claimed.job_id)
    claimed = next(one for one in await rows.claim_all() if one.job_id == claimed.job_id)
    await fail(rows, claimed)
    await jobs.replay(rows.connection, claimed.job_id, "t")
    assert round(await remaining(rows, claimed.job_id) / timedelta(hours=1)) == 13


async def test_the_time_of_a_retried_run_that_began_late_counts_from_its_beginning(rows: Rows) -> None:
    start = datetime.now(UTC) - timedelta(hours=1)
    claimed = await leased_run(rows, not_before=start, deadline_at=start + timedelta(hours=5))
    await fail(rows, claimed)
    await jobs.replay(rows.connection, claimed.job_id, "t")
    assert round(await remaining(rows, claimed.job_id) / timedelta(hours=1)) == 5


async def test_a_retried_job_that_may_wait_for_its_limits_as_long_as_it_likes_has_its_time_after_that(
    rows: Rows,
) -> None:
    timed = Pipeline(
        "timed", module="tests.factories", steps=[Step("only")], terms=RunTerms(timeout=timedelta(hours=3))
    )
    claimed = await rows.leased(timed)
    await fail(rows, claimed)
    await jobs.replay(rows.connection, claimed.job_id, "t", terms=AdmissionTerms([LIMIT]))
    assert (await rows.job(claimed.job_id))["deadline_at"] is None
    await concurrency.admit(rows.connection, [("t", "k")])
    assert round(await remaining(rows, claimed.job_id) / timedelta(hours=1)) == 3


async def subscribe(rows: Rows, tenant: str, *, enabled: bool = True) -> None:
    await rows.connection.execute(
        "INSERT INTO webhook (id, tenant_id, url, secrets, events, enabled)"
        " VALUES ($1, $2, 'https://x', '{}', '{}', $3)",
        uuid4(),
        tenant,
        enabled,
    )


@pytest.mark.parametrize("asked_by", ["nobody", "a webhook", "a callback", "a pipeline that follows"])
async def test_the_next_end_of_a_retried_job_is_reported_to_those_who_ask_for_it_now(rows: Rows, asked_by: str) -> None:
    """A webhook of another tenant, a disabled one, and the callback of another job ask for nothing."""
    await subscribe(rows, "other")
    await subscribe(rows, "t", enabled=False)
    await rows.leased(callback_url="https://y")
    claimed = await rows.leased(callback_url="https://x" if asked_by == "a callback" else None)
    await fail(rows, claimed)
    await rows.connection.execute("UPDATE job SET notify = false")  # the first end is reported
    if asked_by == "a webhook":
        await subscribe(rows, "t")
    followed = ["one"] if asked_by == "a pipeline that follows" else ["three"]
    await jobs.replay(rows.connection, claimed.job_id, "t", followed=followed)
    assert (await rows.job(claimed.job_id))["notify"] == (asked_by != "nobody")


@pytest.mark.parametrize(
    ("from_step", "kept"),
    [("a", set()), ("b", {"a"}), ("part.0", {"a"}), ("part.1", {"a", "part.0"}), (None, {"a", "part.0"})],
)
async def test_a_step_that_runs_again_loses_its_results_and_every_other_step_keeps_them(
    rows: Rows, from_step: str | None, kept: set[str]
) -> None:
    job = await failed(rows)
    await jobs.replay(rows.connection, job.id, "t", from_step=from_step)
    for table in ("result", "output"):
        found = await rows.connection.fetch(f"SELECT t.step FROM {table} r JOIN task t ON t.id = r.task_id")
        assert {row["step"] for row in found} == kept, table
    statuses = await rows.statuses(job.id)
    assert {name for name, status in statuses.items() if status == "succeeded"} == kept
    await assert_history(rows, job.id)


async def test_a_later_step_divides_its_work_anew_when_a_part_of_an_earlier_one_runs_again(rows: Rows) -> None:
    claimed = await rows.leased(THREE)
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    for name in ("early", "late"):
        (spreading,) = await rows.claim_all()
        parts = [Part(name, "default", 1, "three.b", number) for number in range(2)]
        await settlements.fan_out(rows.connection, [FanningOut(spreading.lease, parts)])
        first, second = sorted(await rows.claim_all(), key=lambda part: part.step)
        await settlements.complete(rows.connection, [Completion(first.lease)])
        if name == "late":
            await fail(rows, second)
            break
        await settlements.complete(rows.connection, [Completion(second.lease)])
        (joining,) = await rows.claim_all()
        await settlements.complete(rows.connection, [Completion(joining.lease)])
    await jobs.replay(rows.connection, claimed.job_id, "t", from_step="early.0")
    assert await rows.statuses(claimed.job_id) == {
        "a": "succeeded", "b": "blocked", "c": "blocked", "early.0": "pending", "early.1": "succeeded",
    }  # fmt: skip
    await assert_history(rows, claimed.job_id)


@pytest.mark.parametrize("from_step", ["quick", "unheard_of"])
async def test_a_job_goes_on_only_from_a_step_that_it_has(rows: Rows, from_step: str) -> None:
    """`quick` was left out at the submission."""
    pipeline = Pipeline(
        "left_out", module="tests.factories", steps=[Step("a"), Step("quick", needs=("a",), skip_if=SkipIf("/quick"))]
    )
    claimed = await rows.leased(pipeline, params={"quick": True})
    await fail(rows, claimed)
    before = await rows.job(claimed.job_id)
    with pytest.raises(Invalid, match="has no such step"):
        await jobs.replay(rows.connection, claimed.job_id, "t", from_step=from_step)
    assert await rows.job(claimed.job_id) == before
    assert await rows.statuses(claimed.job_id) == {"a": "failed", "quick": "skipped"}


async def test_the_state_of_a_job_is_its_own(rows: Rows) -> None:
    claimed = [await rows.leased() for _ in range(3)]
    await fail(rows, claimed[1])
    states = [await jobs.state_of(rows.connection, one.job_id) for one in claimed]
    assert states == ["running", "failed", "running"]


async def _from_its_first_step(rows: Rows, job_id: UUID) -> Any:
    return await jobs.replay(rows.connection, job_id, "t", from_step="a")


async def _together(rows: Rows, job_id: UUID) -> Any:
    return await jobs.replay_together(rows.connection, [job_id], "t") or None


@pytest.mark.parametrize("retry", [_from_its_first_step, _together])
async def test_of_two_who_retry_a_job_at_once_one_retries_it(
    rows: Rows, another: Open, retry: Callable[[Rows, UUID], Awaitable[Any]]
) -> None:
    job, other = await failed(rows), await another()
    async with other.connection.transaction():
        assert await retry(other, job.id)
        second = asyncio.ensure_future(retry(rows, job.id))
        await until_waiting(other.connection)
    assert await second is None
    assert (await rows.job(job.id))["status"] == "queued"
    assert len(await rows.claim_all()) == 1
    await assert_history(rows, job.id)


async def failed_workflow(rows: Rows, *calls: Call, since: bool = False) -> Claimed:
    """A failed workflow whose first step failed; its others were stopped. `since`: it made a call after that."""
    workflow = await suspended(rows, *calls, ends=1)
    first = (await children(rows))[0]
    await fail(rows, first)
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    if since:
        calls = (Call("", len(calls) + 1, "call", "f", "done", {}),)
        await recording.record(rows.connection, [Recording(again.lease, calls)])
    await fail(rows, again)
    return again


async def test_a_step_of_a_workflow_runs_again_whatever_another_workflow_has_called_since(rows: Rows) -> None:
    workflow = await failed_workflow(rows, step(1))
    await failed_workflow(rows, step(1), since=True)
    await jobs.replay(rows.connection, workflow.job_id, "t")
    statuses = await rows.statuses(workflow.job_id)
    assert statuses == {"only": "pending", "child#1": "pending"}


async def test_a_step_whose_failure_its_workflow_has_recorded_stays_failed_and_the_others_run_again(rows: Rows) -> None:
    """The workflow has made no call since. On its way it has caught the failure that it recorded."""
    workflow = await suspended(rows, step(1), step(2), ends=2)
    await fail(rows, *await children(rows))
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    caught = Call("", 1, "run", "child", "failed", {"code": "bad", "message": "no"})
    await recording.record(rows.connection, [Recording(again.lease, (caught,))])
    await fail(rows, again)
    await jobs.replay(rows.connection, workflow.job_id, "t")
    statuses = await rows.statuses(workflow.job_id)
    assert statuses == {"only": "pending", "child#1": "failed", "child#2": "pending"}
    await assert_history(rows, workflow.job_id)


async def test_a_run_goes_on_from_a_step_of_its_workflow_though_the_workflow_has_gone_on_since(rows: Rows) -> None:
    workflow = await suspended(rows, step(1), step(2), ends=2)
    steps = await children(rows)
    await settlements.complete(rows.connection, [Completion(one.lease, value={"value": 1}) for one in steps])
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    await recording.record(rows.connection, [Recording(again.lease, (Call("", 3, "call", "f", "done", {}),))])
    await fail(rows, again)
    await jobs.replay(rows.connection, workflow.job_id, "t", from_step="child#1")
    statuses = await rows.statuses(workflow.job_id)
    assert statuses == {"only": "pending", "child#1": "pending", "child#2": "succeeded"}
    await assert_history(rows, workflow.job_id)
    due = await rows.claim_all()
    await settlements.complete(rows.connection, [Completion(one.lease) for one in due])
    assert (await rows.job(workflow.job_id))["status"] == "succeeded"
    await assert_history(rows, workflow.job_id)


async def test_the_steps_of_a_retried_workflow_that_its_failure_stopped_are_counted_once(rows: Rows) -> None:
    """One had failed before that, and its failure was counted then."""
    workflow = await failed_workflow(rows, step(1), step(2))
    assert await rows.statuses(workflow.job_id) == {"only": "failed", "child#1": "failed", "child#2": "cancelled"}
    await jobs.replay(rows.connection, workflow.job_id, "t")
    await assert_history(rows, workflow.job_id)
    steps = await rows.claim_all()
    await settlements.complete(rows.connection, [Completion(one.lease) for one in steps])
    assert (await rows.job(workflow.job_id))["status"] == "succeeded"


async def journal(rows: Rows) -> dict[tuple[UUID, int], str]:
    found = await rows.connection.fetch("SELECT job_id, number, state FROM journal")
    return {(row["job_id"], row["number"]): row["state"] for row in found}


async def test_a_retried_run_outlives_the_ended_workflow_that_started_it_and_no_other_call_changes(rows: Rows) -> None:
    """Otherwise it would be cancelled with the workflow. Its own workflow may still run, or await its result."""
    retried, sibling, of_running = [await rows.leased() for _ in range(3)]
    await fail(rows, retried, sibling, of_running)
    ended, awaiting, running = [await rows.leased() for _ in range(3)]
    started = tuple(Call("", n, "start", "one", child=run.job_id) for n, run in enumerate((retried, sibling), start=1))
    await settlements.suspend(rows.connection, [Suspending(ended.lease, (*started, step(3)), 0, 1)])
    result = (Call("", 1, "result", "one", child=retried.job_id), step(2))
    await settlements.suspend(rows.connection, [Suspending(awaiting.lease, result, 0, 1)])
    going_on = (Call("", 1, "start", "one", child=of_running.job_id), step(2))
    await settlements.suspend(rows.connection, [Suspending(running.lease, going_on, 0, 1)])
    for child in await children(rows):
        if child.job_id != running.job_id:
            await settlements.complete(rows.connection, [Completion(child.lease)])
    await fail(rows, *[one for one in await rows.claim_all() if one.job_id != running.job_id])
    assert (await rows.job(ended.job_id))["status"] == (await rows.job(awaiting.job_id))["status"] == "failed"
    before = await journal(rows)
    assert before[ended.job_id, 1] == "open"
    await jobs.replay(rows.connection, retried.job_id, "t")
    after = await journal(rows)
    assert after == before | {(ended.job_id, 1): "done"}
    await jobs.replay(rows.connection, of_running.job_id, "t")
    assert await journal(rows) == after
    await assert_histories(rows.connection)


async def test_a_workflow_that_recorded_the_failure_of_a_run_reads_it_though_the_run_was_retried_since(
    rows: Rows,
) -> None:
    child, workflow = await rows.leased(), await rows.leased()
    await fail(rows, child)
    error = {"code": "bad", "message": "no"}
    for state, value in (("open", None), ("failed", error)):
        call = Call("", 1, "start", "one", state, value, child=child.job_id)
        await recording.record(rows.connection, [Recording(workflow.lease, (call,))])
    await fail(rows, workflow)
    await jobs.replay(rows.connection, child.job_id, "t")
    await jobs.replay(rows.connection, workflow.job_id, "t")
    (again,) = await claims.claim(rows.connection, rows.terms, [workflow.lease.task_id])
    (entry,) = (await reading.read(rows.connection, again.lease)).entries
    assert (entry.state, entry.value) == ("failed", error)
