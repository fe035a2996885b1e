"""Runs that a workflow starts, at their rows and beside those of others: who may start one, whose workflow is woken by
an end, which runs are cancelled with their workflow, and which rows of the journal are closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from leasehold.app.writing import template_version_of
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid, LeaseLost
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.domain.pipeline import Pipeline, PipelineLimit, RunTerms, Step
from leasehold.transitions import concurrency, jobs, limits, runs, settlements, sweeps
from leasehold.transitions.claims import Claimed
from leasehold.transitions.limits import TenantRules
from leasehold.transitions.runs import CreatedRuns, NewRun
from leasehold.transitions.settlements import Completion, Failure, Snoozing, Suspending
from leasehold.transitions.workflows import children, recording
from leasehold.transitions.workflows.records import Call, Recording
from tests.factories import ONE, Rows, assert_histories
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_concurrency import Interrupted
from tests.transitions.test_fencing import WRONG
from tests.transitions.test_limits_beside_others import wait_for_no_lock
from tests.transitions.test_retried_jobs import subscribe
from tests.transitions.test_workflows import is_due, step, suspended, table, wait

#: No client may cancel a run of it.
UNCANCELABLE = Pipeline("kept", module="tests.factories", steps=[Step("only")], terms=RunTerms(cancelable=False))


def start(number: int, child: UUID, state: str = "open") -> Call:
    return Call("", number, "start", "one", state, child=child)


def result(number: int, child: UUID, state: str = "open") -> Call:
    return Call("", number, "result", "one", state, child=child)


async def running(rows: Rows, *calls: Call) -> Claimed:
    """A workflow that has made these calls and runs."""
    workflow = await rows.leased()
    answers, _ = await recording.record(rows.connection, [Recording(workflow.lease, calls)])
    assert answers[workflow.lease.task_id].committed
    return workflow


async def pending(rows: Rows, of: Pipeline = ONE) -> UUID:
    """A run that nobody has claimed."""
    (hint,) = await rows.submit(of)
    job_id: UUID = (await rows.task(hint.hint.task_id))["job_id"]
    return job_id


async def fail(rows: Rows, claimed: Claimed, *, retryable: bool = False) -> None:
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "bad", "no", retryable, 60.0)])


async def ended(rows: Rows, *, succeeds: bool = True) -> UUID:
    claimed = await rows.leased()
    if succeeds:
        await settlements.complete(rows.connection, [Completion(claimed.lease)])
    else:
        await fail(rows, claimed)
    return claimed.job_id


async def cancel(rows: Rows, job_id: UUID) -> None:
    await jobs.request_cancel(rows.connection, [job_id], "t", reason="r", by="b")


async def journal(rows: Rows, workflow: Claimed) -> dict[int, dict[str, Any]]:
    found = await rows.connection.fetch("SELECT * FROM journal WHERE job_id = $1", workflow.job_id)
    return {row["number"]: dict(row) for row in found}


# --- the start


async def start_run(rows: Rows, lease: Lease, call: Call) -> CreatedRuns | None:
    assert call.child is not None
    new = NewRun(template_version_of(ONE), "t", {}, id=call.child)
    async with rows.connection.transaction():
        return await children.start(rows.connection, lease, call, new)


async def test_a_run_is_started_once_and_only_by_who_has_the_lease_of_its_own_workflow(rows: Rows) -> None:
    """Another workflow of the same worker has a call at the same place, and is being cancelled. The workflow itself has
    a call of the same number in another branch, and one of another number in this branch.
    """
    others = [await running(rows, Call("", 2, "call", "f", "done", 1)) for _ in range(2)]
    own = await running(rows, Call("", 1, "call", "f", "done", 1), Call("1.0/", 2, "call", "f", "done", 1))
    others += [await running(rows, Call("", 2, "call", "f", "done", 1)) for _ in range(2)]
    for other in others:
        await cancel(rows, other.job_id)
    call = start(2, new_id())
    created = await start_run(rows, own.lease, call)
    assert created is not None
    assert [(await rows.task(hint.hint.task_id))["job_id"] for hint in created.hints] == [call.child]
    before = await table(rows, "job"), await table(rows, "journal")
    for wrong in WRONG.values():  # also one that repeats the call
        for repeated in (call, start(3, new_id())):
            with pytest.raises(LeaseLost):
                await start_run(rows, wrong(own.lease), repeated)
    assert await start_run(rows, own.lease, call) == CreatedRuns([], [])
    assert (await table(rows, "job"), await table(rows, "journal")) == before
    await assert_histories(rows.connection)


async def test_a_workflow_that_is_being_cancelled_starts_detached_runs_alone(rows: Rows) -> None:
    workflow = await running(rows, wait(1))
    await cancel(rows, workflow.job_id)
    bound, detached = start(2, new_id()), start(3, new_id(), "done")
    assert await start_run(rows, workflow.lease, bound) is None
    assert await start_run(rows, workflow.lease, detached) is not None
    assert {row["id"] for row in await table(rows, "job")} == {workflow.job_id, detached.child}
    assert sorted(await journal(rows, workflow)) == [1, 3]


async def test_who_loses_the_lease_while_it_waits_to_start_a_run_starts_none(rows: Rows, another: Open) -> None:
    workflow = await rows.leased()
    other = (await another()).connection
    async with other.transaction():
        await settlements.release(other, [workflow.lease])
        starting = asyncio.create_task(start_run(rows, workflow.lease, start(1, new_id())))
        await until_waiting(other)
    with pytest.raises(LeaseLost):
        await starting
    assert [row["id"] for row in await table(rows, "job")] == [workflow.job_id]


async def test_a_run_in_place_of_a_step_waits_at_the_limits_of_its_task_alone_and_is_reported_to_nobody(
    rows: Rows,
) -> None:
    """Its workflow has a place at the operator's limits, and handles the end. A run that the workflow starts otherwise
    waits at all limits, and is reported.
    """
    task = Pipeline("limited", module="tests.factories", steps=[Step("only")])
    task.limits, task.on_failure = (PipelineLimit(1),), ONE
    await limits.declare(rows.connection, [task], ConcurrencyLimit("t", "tenant", at_most=1))
    await subscribe(rows, "t")
    workflow = await running(rows)
    in_place, beside = [NewRun(template_version_of(task), "t", {}) for _ in range(2)]
    for number, new, waits in ((1, in_place, result(2, in_place.id)), (3, beside, None)):
        async with rows.connection.transaction():
            call = start(number, new.id)
            assert await children.start(rows.connection, workflow.lease, call, new, waits) is not None
    for new, keys, is_reported in (
        (in_place, {"code:limited"}, False),
        (beside, {"code:limited", "tenant"}, True),
    ):
        assert {key for _, key in await concurrency.limits_of(rows.connection, [new.id])} == keys
        assert (await rows.job(new.id))["notify"] == is_reported


#: Its runs wait at a limit of their own.
LIMITED = Pipeline("limited", module="tests.factories", steps=[Step("only")])
LIMITED.limits = (PipelineLimit(1),)


async def do_step(
    rows: Rows, workflow: Claimed, child: UUID, *, again: bool = False, connection: Connection | None = None
) -> CreatedRuns | None:
    """Start, or start again, a run that does the work of a step."""
    new = NewRun(template_version_of(LIMITED), "t", {}, id=child)
    call = Call("", 1, "start", "limited#1", child=child)
    end = Call("1/", 1, "result", "limited#1", child=child)
    connection = connection or rows.connection
    async with connection.transaction():
        return await children.start(connection, workflow.lease, call, new, end, again=again)


async def failed_step(rows: Rows) -> tuple[Claimed, UUID]:
    """A workflow that failed with the run that does the work of its step, and that is retried and runs now."""
    workflow, child = await rows.leased(), new_id()
    created = await do_step(rows, workflow, child)
    assert created is not None
    await concurrency.admit(rows.connection, created.limits)
    for claimed in (*await rows.claim_all(), workflow):
        await fail(rows, claimed)
    assert [(await rows.job(job_id))["status"] for job_id in (child, workflow.job_id)] == ["failed"] * 2
    assert await jobs.replay(rows.connection, workflow.job_id, "t") is not None
    (workflow,) = await rows.claim_all()
    return workflow, child


async def test_a_retried_workflow_retries_the_run_of_its_step_once_and_waits_for_it(rows: Rows) -> None:
    """The run waits at its limits again. Once somebody else has retried it, the workflow only waits for it."""
    for retried_by_others in (False, True):
        workflow, child = await failed_step(rows)
        if retried_by_others:
            assert await jobs.replay(rows.connection, child, "t") is not None
        created = await do_step(rows, workflow, child, again=True)
        name = [(limit.tenant_id, limit.key) for limit in limits_of_step(child)]
        assert created == CreatedRuns([], [] if retried_by_others else name)
        job = await rows.job(child)
        assert (job["status"], job["held"]) == (("queued", False) if retried_by_others else ("pending", True))
        entries = await rows.connection.fetch(
            "SELECT kind, state, child_id FROM journal WHERE job_id = $1 ORDER BY branch", workflow.job_id
        )
        assert [tuple(row) for row in entries] == [("start", "open", child), ("result", "open", child)]
        await rows.connection.execute("DELETE FROM job")


def limits_of_step(child: UUID) -> Sequence[ConcurrencyLimit]:
    new = NewRun(template_version_of(LIMITED), "t", {}, id=child, is_step=True)
    return runs.limits_of(new, TenantRules([], False))


async def test_a_workflow_that_retries_the_run_of_its_step_does_not_deadlock_with_a_run_that_replaces_the_workflow(
    rows: Rows, another: Open
) -> None:
    """The run that replaces it locks its limits first, and then cancels the workflow."""
    workflow, child = await failed_step(rows)
    other = (await another()).connection
    async with rows.connection.transaction():
        await concurrency.lock_limits(rows.connection, limits_of_step(child))
        starting = asyncio.create_task(do_step(rows, workflow, child, again=True, connection=other))
        await until_waiting(rows.connection)
        await rows.connection.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", workflow.job_id)
    assert await starting is not None
    assert (await rows.job(child))["held"]


async def test_workflows_start_runs_at_one_limit_without_waiting_for_each_other(rows: Rows, another: Open) -> None:
    first, second, third = [await rows.leased() for _ in range(3)]
    await do_step(rows, first, new_id())
    other = (await another()).connection
    await other.execute("SET lock_timeout = '5 s'")  # a wait for the second start would be one without end
    async with rows.connection.transaction():
        await do_step(rows, second, new_id())
        created = await do_step(rows, third, new_id(), connection=other)
    assert created is not None
    assert await rows.connection.fetchval("SELECT count(*) FROM job WHERE held") == 3


# --- the wake


async def test_the_end_of_a_run_wakes_the_workflow_that_waits_for_it_and_touches_no_other(
    rows: Rows, another: Open
) -> None:
    """Nor does it lock another: one that waits for a run that goes on, that runs, that waits for its next attempt, that
    is due already, that has read the result, or that has ended itself. Nor does it change what else the workflow itself
    waits for.
    """
    first, second, going = await ended(rows), await ended(rows, succeeds=False), (await rows.leased()).job_id
    sleep = Call("", 4, "sleep", "", delay=3600.0)
    own = await suspended(rows, result(1, first), result(2, second), result(3, going), sleep, step(5), ends=1)
    await suspended(rows, result(1, going), wait(2))
    await suspended(rows, result(1, first, "done"), wait(2))
    await running(rows, result(1, first), step(2))
    retried, succeeded = [await running(rows, result(1, first)) for _ in range(2)]
    await fail(rows, retried, retryable=True)
    await settlements.complete(rows.connection, [Completion(succeeded.lease)])
    steps = [one for one in await rows.claim_all() if "#" in one.step]
    await settlements.snooze(rows.connection, [Snoozing(one.lease, 3600.0) for one in steps])
    await suspended(rows, result(1, first), delay=0.0)
    tasks, entries = await table(rows, "task"), await table(rows, "journal")
    other = (await another()).connection
    async with rows.connection.transaction():
        (hint,) = await children.wake_waiting(rows.connection)
        free = {row["id"] for row in await other.fetch("SELECT id FROM job FOR UPDATE SKIP LOCKED")}
    assert {row["id"] for row in await table(rows, "job")} - free == {own.job_id}
    assert hint.hint.task_id == own.lease.task_id
    assert await is_due(rows, own)
    (task,) = [row for row in tasks if row["id"] == own.lease.task_id]
    woken = await rows.task(own.lease.task_id)
    assert woken == task | {"news": task["news"] + 1, "wake_at": None, "available_at": woken["available_at"]}
    assert len(steps) == 2
    assert [row["id"] for row in await table(rows, "task") if row not in tasks] == [own.lease.task_id]
    changed = [(row["job_id"], row["number"]) for row in await table(rows, "journal") if row not in entries]
    assert sorted(changed) == [(own.job_id, 1), (own.job_id, 2)]
    assert await children.wake_waiting(rows.connection) == []
    await assert_histories(rows.connection)


async def test_a_workflow_that_another_transaction_has_locked_is_woken_in_the_next_turn(
    rows: Rows, another: Open
) -> None:
    """It may be suspending, or take a signal; the duty waits for nobody."""
    workflow = await suspended(rows, result(1, await ended(rows)))
    await wait_for_no_lock(rows)
    other = (await another()).connection
    async with other.transaction():
        await other.execute("SELECT FROM job WHERE id = $1 FOR UPDATE", workflow.job_id)
        assert await children.wake_waiting(rows.connection) == []
    assert len(await children.wake_waiting(rows.connection)) == 1


async def test_a_workflow_whose_run_is_retried_just_before_the_wake_waits_for_the_next_end_of_the_run(
    rows: Rows, another: Open
) -> None:
    """A workflow that runs has an ended run, too, which is no reason to wake this one."""
    retried, over = await ended(rows, succeeds=False), await ended(rows)
    await running(rows, result(1, over))
    workflow = await suspended(rows, result(1, retried), wait(2))
    other = (await another()).connection
    # The first query locks the workflows that are to be woken.
    interrupted = Interrupted(rows.connection, lambda: jobs.replay(other, retried, "t"))
    assert await children.wake_waiting(cast("Connection", interrupted)) == []
    assert interrupted.is_interrupted
    assert not await is_due(rows, workflow)
    (claimed,) = await rows.claim_all()
    assert claimed.job_id == retried
    await settlements.complete(rows.connection, [Completion(claimed.lease)])
    assert len(await children.wake_waiting(rows.connection)) == 1


# --- the cancel


async def test_the_runs_of_a_workflow_that_ends_without_success_are_cancelled_and_no_others(rows: Rows) -> None:
    """Even those that no client may cancel. The runs of a workflow that runs or has succeeded go on, and so do those
    that are detached, and those of others for whose result the workflow waited.
    """
    orphans = [await pending(rows, UNCANCELABLE) for _ in range(4)]
    cancelling, cancelled, failed, expired = [await running(rows, start(1, orphan)) for orphan in orphans]
    kept = [await pending(rows, UNCANCELABLE) for _ in range(4)]
    of_running, of_succeeded, awaited, detached = kept
    await running(rows, start(1, of_running))
    succeeded = await running(rows, start(1, of_succeeded))
    await settlements.complete(rows.connection, [Completion(succeeded.lease)])
    over, asked = await ended(rows), (await rows.leased()).job_id
    await cancel(rows, asked)
    bystander = await running(rows, result(1, awaited), start(2, detached, "done"), start(3, over), start(4, asked))
    for workflow in (failed, bystander):
        await fail(rows, workflow)
    for workflow in (cancelling, cancelled):
        await cancel(rows, workflow.job_id)
    await settlements.acknowledge_cancel(rows.connection, [cancelled.lease])
    await rows.connection.execute("UPDATE job SET deadline_at = now() WHERE id = $1", expired.job_id)
    assert len(await sweeps.expire_jobs(rows.connection)) == 1
    parents = [(await rows.job(one.job_id))["status"] for one in (cancelling, cancelled, failed, expired)]
    assert parents == ["cancel_requested", "cancelled", "failed", "expired"]
    before = await table(rows, "job")
    ends, hints, more = await children.cancel_orphans(rows.connection, limit=5)
    assert ([end.outcome for end in ends], hints, more) == (["cancelled"] * 4, [], False)
    for orphan, parent, status in zip(orphans, (cancelling, cancelled, failed, expired), parents, strict=True):
        job = await rows.job(orphan)
        assert job["status"] == "cancelled"
        assert f"run {parent.job_id}, is {status}" in job["cancel"]["reason"]
    assert {row["id"] for row in await table(rows, "job") if row not in before} == set(orphans)
    assert await children.cancel_orphans(rows.connection, limit=1) == ([], [], False)
    await assert_histories(rows.connection)


# --- the end


async def test_a_call_is_closed_once_neither_the_workflow_nor_its_end_needs_the_run(rows: Rows) -> None:
    """A failed run may be retried, and must then be cancelled with its workflow; a result may be read once more. Only a
    failed workflow can be retried: the retry finds its calls by their mark.
    """
    awaited = [await ended(rows), await ended(rows, succeeds=False), (await rows.leased()).job_id]
    calls = [call(2 * n + m, run) for n, run in enumerate(awaited) for m, call in enumerate((start, result))]
    read = [result(7, awaited[0], "failed"), result(8, awaited[0], "timed_out")]
    others = [Call("1.0/", n, "result", "one", child=awaited[2]) for n in range(5)]
    workflows = [await running(rows, *calls, *read, wait(9), *others) for _ in range(4)]
    succeeded, failed, cancelled, _ = workflows
    await settlements.complete(rows.connection, [Completion(succeeded.lease)])
    await fail(rows, failed)
    await cancel(rows, cancelled.job_id)
    await settlements.acknowledge_cancel(rows.connection, [cancelled.lease])
    closed: dict[str, list[tuple[str, int]]] = {}
    before = await table(rows, "journal")
    await children.close_calls(rows.connection)
    after = {(row["job_id"], row["branch"], row["number"]): row for row in await table(rows, "journal")}
    for workflow in workflows:
        status = (await rows.job(workflow.job_id))["status"]
        entries = [row for row in before if row["job_id"] == workflow.job_id]
        changed = [row for row in entries if after[row["job_id"], row["branch"], row["number"]] != row]
        for row in changed:
            mark = {"closed": True} if (status, row["kind"]) == ("failed", "start") else None
            assert after[row["job_id"], row["branch"], row["number"]] == row | {"state": "done", "value": mark}
        closed[status] = sorted((row["branch"], row["number"]) for row in changed)
    unneeded = [("", n) for n in range(4)]
    needed_by_a_live_workflow_alone = [("", 4), ("", 5), *(("1.0/", n) for n in range(5))]
    assert closed == {
        "succeeded": unneeded + needed_by_a_live_workflow_alone,
        "failed": unneeded,
        "cancelled": unneeded,
        "running": [],
    }


@pytest.mark.parametrize("suspends", [False, True])
async def test_the_record_of_a_result_closes_the_call_that_started_the_run_and_no_other(
    rows: Rows, *, suspends: bool
) -> None:
    """A failed run may be retried: its call gets a mark, and stays open. So do the calls of runs of which the workflow
    reads nothing now, and those of other workflows, also if they started the run, or have a call at the same place. A
    detached run keeps its call, and another wait for it stays open. A wait that ends by a cancel has no result.
    """
    read, other, unread, broken, foreign, detached = [await ended(rows, succeeds=n not in (3, 5)) for n in range(6)]
    places = [Call("1.0/", n, "result", "one", child=unread) for n in (6, 7)]
    await running(rows, start(2, foreign), start(1, unread), result(5, read), *places)
    starts = [start(n, run) for n, run in enumerate((read, other, unread, broken), 1)]
    starts += [Call("1.0/", n, "start", "one", child=unread) for n in (1, 4)]
    starts.append(start(11, detached, "done"))
    awaits = [Call("1.0/", 6, "result", "one", child=read), Call("1.0/", 7, "result", "one", child=broken)]
    awaits += [result(5, other), result(6, other), result(7, unread), result(8, foreign)]
    awaits += [result(12, detached), result(13, detached), result(14, read)]
    own = await running(rows, *starts, *awaits, wait(9))
    before = await table(rows, "journal")
    ends = [
        result(14, read, "cancelled"),
        Call("", 13, "result", "one", "failed", {"code": "c", "message": "m"}),
        Call("1.0/", 6, "result", "one", "done", {"value": 1, "at": "2026-01-01T00:00:00+00:00"}),
        Call("1.0/", 7, "result", "one", "failed", {"code": "c", "message": "m"}),
        Call("", 8, "result", "one", "done", {"value": None, "at": "2026-01-01T00:00:00+00:00"}),
        result(10, unread),
    ]
    if suspends:
        await settlements.suspend(rows.connection, [Suspending(own.lease, tuple(ends), 0, None, None)])
    else:
        for _ in range(2):
            await recording.record(rows.connection, [Recording(own.lease, tuple(ends))])
    after = await table(rows, "journal")
    recorded = {(own.job_id, call.branch, call.number) for call in ends}
    changed = [
        row for row in after if row not in before and (row["job_id"], row["branch"], row["number"]) not in recorded
    ]
    started = {row["child_id"]: row for row in before if (row["job_id"], row["kind"]) == (own.job_id, "start")}
    expected = [started[read] | {"state": "done"}, started[broken] | {"value": {"known": True}}]
    assert sorted(changed, key=lambda row: row["number"]) == expected


async def test_the_call_that_started_a_run_which_is_deleted_is_closed_and_the_wait_for_the_run_is_not(
    rows: Rows,
) -> None:
    """The open wait wakes the workflow. Once the workflow has ended, the wait is closed, too."""
    deleted = await ended(rows)
    goes_on, failed, succeeded = [await running(rows, start(1, deleted), result(2, deleted)) for _ in range(3)]
    await fail(rows, failed)
    await settlements.complete(rows.connection, [Completion(succeeded.lease)])
    await rows.connection.execute("DELETE FROM job WHERE id = $1", deleted)
    await children.close_calls(rows.connection)
    for workflow, states in ((goes_on, ["done", "open"]), (failed, ["done"] * 2), (succeeded, ["done"] * 2)):
        assert [row["state"] for _, row in sorted((await journal(rows, workflow)).items())] == states


async def test_a_bounded_number_of_calls_is_closed_at_once_and_whether_there_may_be_more_is_told(rows: Rows) -> None:
    """Those that stay open, of a workflow that goes on, take no place of the others."""
    runs = [await ended(rows) for _ in range(5)]
    goes_on = await running(rows, *[result(n, run) for n, run in enumerate(runs)])
    failed = await running(rows, *[start(n, run) for n, run in enumerate(runs)])
    await fail(rows, failed)
    closed = "SELECT count(*) FROM journal WHERE state = 'done'"
    for is_more, count in ((True, 2), (True, 4), (False, 5), (False, 5)):
        assert await children.close_calls(rows.connection, 2) == is_more
        assert await rows.connection.fetchval(closed) == count
    assert {row["state"] for row in (await journal(rows, goes_on)).values()} == {"open"}
    last = await running(rows, start(0, runs[0]), start(1, runs[1]))
    await fail(rows, last)
    assert await children.close_calls(rows.connection, 2) is True, "there may be more"


# --- the retry


async def test_a_retried_workflow_waits_again_for_the_runs_that_may_still_end_and_no_other_row_opens(
    rows: Rows,
) -> None:
    """Its calls were closed when it had failed. What it had recorded stays, and a detached run stays detached. A
    workflow that stays failed keeps its rows closed.
    """
    succeeded, broken = await ended(rows), await ended(rows, succeeds=False)
    read = [
        Call("", 5, "result", "one", "done", {"value": 1, "at": "2026-01-01T00:00:00+00:00"}, child=succeeded),
        Call("", 6, "result", "one", "failed", {"code": "c", "message": "m"}, child=broken),
        Call("", 7, "call", "f", "done", {"value": None}),
        result(9, broken, "cancelled"),
    ]
    calls = [start(0, broken), result(1, broken), start(2, succeeded), result(3, succeeded), start(4, broken, "done")]
    retried, stays = [await running(rows, *calls, *read, wait(8)) for _ in range(2)]
    for workflow in (retried, stays):
        await fail(rows, workflow)
    before = await journal(rows, retried)
    await children.close_calls(rows.connection)
    assert [row["number"] for row in (await journal(rows, retried)).values() if row["state"] == "open"] == [8]
    others = await journal(rows, stays)
    assert await jobs.replay(rows.connection, retried.job_id, "t") is not None
    after = await journal(rows, retried)
    assert after == before
    assert await journal(rows, stays) == others
    await assert_histories(rows.connection)


def alone(number: int, child: UUID, state: str = "open", value: Any = None) -> tuple[Call, Call]:
    """`ctx.run` of a task with a limit: a run of its own does the work, so that the call has two rows."""
    name = f"alone#{number}"
    return (
        Call("", number, "start", name, "done" if state == "done" else "open", child=child),
        Call(f"{number}/", 1, "result", name, state, value, child=child),
    )


DONE = {"value": 1, "at": "2026-01-01T00:00:00+00:00"}
ERROR = {"code": "c", "message": "m"}


async def a_run(rows: Rows, state: str) -> UUID:
    """A run in this state. `deleted`: it succeeded, and its row is gone."""
    if state in ("succeeded", "failed", "deleted"):
        run = await ended(rows, succeeds=state != "failed")
    elif state == "cancelled":
        run = await pending(rows)
    else:
        run = (await rows.leased()).job_id
    if state in ("cancelled", "cancel_requested"):
        await cancel(rows, run)
    if state == "expired":
        await rows.connection.execute("UPDATE job SET deadline_at = now() WHERE id = $1", run)
        await sweeps.expire_jobs(rows.connection)
    if state == "deleted":
        await rows.connection.execute("DELETE FROM job WHERE id = $1", run)
    else:
        assert (await rows.job(run))["status"] == state
    return run


@pytest.mark.parametrize("closed", [False, True])
async def test_a_retried_workflow_makes_those_calls_again_whose_runs_will_not_succeed_and_no_other(
    rows: Rows, *, closed: bool
) -> None:
    """The call of a failed run keeps its start: the workflow retries this run. A call whose end the workflow has
    recorded stays, and so does a run that the workflow itself started. `closed`: the duty has come since the failure.
    """
    states = ("succeeded", "running", "failed", "cancelled", "expired", "cancel_requested", "deleted")
    runs = {state: await a_run(rows, state) for state in states}
    calls = [call for number, run in enumerate(runs.values(), 1) for call in alone(number, run)]
    over, broken = await a_run(rows, "deleted"), await a_run(rows, "failed")
    read = [*alone(8, over, "done", DONE), *alone(9, broken, "failed", ERROR)]
    own_runs = [start(10, await a_run(rows, "cancelled")), result(11, await a_run(rows, "failed"))]
    retried, stays = [await running(rows, *calls, *read, *own_runs, wait(12)) for _ in range(2)]
    beside = await running(rows, *alone(4, await a_run(rows, "failed")), *alone(1, await a_run(rows, "expired")))
    for workflow in (retried, stays, beside):
        await fail(rows, workflow)
    before = await table(rows, "journal")
    if closed:
        await children.close_calls(rows.connection)
    unchanged = [row for row in await table(rows, "journal") if row["job_id"] == stays.job_id]
    await jobs.replay_together(rows.connection, [retried.job_id, beside.job_id], "t")
    again = [(f"{number}/", 1) for number in (3, 4, 5, 6, 7)] + [("", number) for number in (4, 5, 6, 7)]
    deleted = {(retried.job_id, *place) for place in again}
    deleted |= {(beside.job_id, *place) for place in (("4/", 1), ("1/", 1), ("", 1))}
    after = await table(rows, "journal")
    assert [row for row in after if row["job_id"] == stays.job_id] == unchanged
    expected = [row for row in before if (row["job_id"], row["branch"], row["number"]) not in deleted]
    assert [row for row in after if row["job_id"] != stays.job_id] == [
        row for row in expected if row["job_id"] != stays.job_id
    ]
    await assert_histories(rows.connection)


@pytest.mark.parametrize("state", ["succeeded", "failed", "running", "cancel_requested", "deleted"])
async def test_a_run_that_goes_on_from_a_call_makes_this_call_again_unless_its_run_goes_on(
    rows: Rows, state: str
) -> None:
    """The workflow has recorded the end of the run. A person may have retried the run since, and then cancelled it. The
    other calls stay, and so do the calls of another workflow that awaited the same run.
    """
    run = await a_run(rows, state)
    calls = [*alone(1, run, "failed", ERROR), *alone(2, await a_run(rows, "succeeded"), "done", DONE)]
    own, other = [await running(rows, *calls) for _ in range(2)]
    for workflow in (own, other):
        await fail(rows, workflow)
    before = await table(rows, "journal")
    await jobs.replay(rows.connection, own.job_id, "t", from_step="alone#1")
    again = {"failed": [("1/", 1)], "running": []}.get(state, [("1/", 1), ("", 1)])
    deleted = {(own.job_id, *place) for place in again}
    after = await table(rows, "journal")
    assert after == [row for row in before if (row["job_id"], row["branch"], row["number"]) not in deleted]


async def test_a_run_goes_on_only_from_a_call_of_its_own_workflow_whose_work_a_run_does(rows: Rows) -> None:
    """Not from the wait for such a run, and not from a run that the workflow itself started."""
    own = await running(rows, *alone(1, await ended(rows), "done", DONE), start(2, await ended(rows)))
    other = await running(rows, *alone(3, await ended(rows), "done", DONE))
    for workflow in (own, other):
        await fail(rows, workflow)
    before = await table(rows, "journal")
    for name in ("alone#3", "1/alone#1", "one", "alone"):
        with pytest.raises(Invalid, match="no such step"):
            await jobs.replay(rows.connection, own.job_id, "t", from_step=name)
    assert await table(rows, "journal") == before
    assert await jobs.replay(rows.connection, own.job_id, "t", from_step="alone#1") is not None


@pytest.mark.parametrize("first", ["the workflow", "the run", "both at once"])
async def test_a_run_that_is_retried_beside_its_workflow_before_the_duty_has_come_belongs_to_it(
    rows: Rows, first: str
) -> None:
    """And a detached one does not."""
    broken = await ended(rows, succeeds=False)
    workflow = await running(rows, start(0, broken), result(1, broken), start(2, broken, "done"))
    await fail(rows, workflow)
    before = await journal(rows, workflow)
    if first == "both at once":
        await jobs.replay_together(rows.connection, [workflow.job_id, broken], "t")
    else:
        for job_id in (workflow.job_id, broken) if first == "the workflow" else (broken, workflow.job_id):
            assert await jobs.replay(rows.connection, job_id, "t") is not None
    await children.close_calls(rows.connection)
    assert await journal(rows, workflow) == before


async def test_the_duty_closes_no_call_of_a_workflow_that_is_just_being_retried(rows: Rows, another: Open) -> None:
    """It reads that the workflow has failed, and the retry commits before it writes. It waits for nobody."""
    broken = await ended(rows, succeeds=False)
    workflow = await running(rows, start(0, broken), result(1, broken))
    await fail(rows, workflow)
    before = await journal(rows, workflow)
    other = (await another()).connection
    async with other.transaction():
        await jobs.replay(other, workflow.job_id, "t")
        await children.close_calls(rows.connection)
    assert await journal(rows, workflow) == before


async def test_the_duty_closes_no_call_of_a_workflow_whose_retry_commits_before_it_comes_to_that_call(
    rows: Rows, another: Open
) -> None:
    """Another row holds it up, and its snapshot still has the workflow as failed."""
    held, broken = await ended(rows, succeeds=False), await ended(rows, succeeds=False)
    first, workflow = await running(rows, start(0, held)), await running(rows, start(0, broken), result(1, broken))
    for failing in (first, workflow):
        await fail(rows, failing)
    before = await journal(rows, workflow)
    other, third = (await another()).connection, (await another()).connection
    async with other.transaction():
        await other.execute("SELECT FROM journal WHERE job_id = $1 FOR UPDATE", first.job_id)
        closing = asyncio.create_task(children.close_calls(rows.connection))
        await until_waiting(other)
        assert await jobs.replay(third, workflow.job_id, "t") is not None
    await closing
    assert [row["state"] for row in (await journal(rows, first)).values()] == ["done"]
    assert await journal(rows, workflow) == before
