"""While a tenant moves to another cell nothing of it becomes due here; if the move is undone, everything is due when it
was. The rows of other tenants, and those that wait for no time, are not even written.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from leasehold.cli.moving_rows import hold_new_work, release
from leasehold.domain.ids import new_id
from leasehold.domain.states import TaskState
from leasehold.transitions import moves, settlements
from leasehold.transitions.claims import Claimed
from leasehold.transitions.settlements import Completion, Settled, Suspending
from tests.factories import SELDOM, THREE, Rows, assert_history
from tests.support.lock_waits import until_waiting
from tests.transitions.conftest import Open
from tests.transitions.test_matrix import put_into
from tests.transitions.test_runs_beside_others import create, new_run, pipeline
from tests.transitions.test_workflows import children, step, suspended

A_THOUSAND_YEARS = timedelta(hours=8_766_000)
SOON = datetime.now(UTC) + timedelta(hours=1)
#: A client has named this time for a run. It is when a task that is due soon is due while its tenant moves.
NAMED = SOON + A_THOUSAND_YEARS
WAITS = ("pending", "retry", "waiting")


async def things_of(rows: Rows, tenant: str) -> None:
    """A task in each state, runs with and without a named time, and schedules that are active and paused."""
    for state in TaskState:
        _, lease = await put_into(rows, state)
        await rows.connection.execute(
            "UPDATE task SET tenant_id = $2, available_at = $3 WHERE id = $1", lease.task_id, tenant, SOON
        )
    for time in (None, SOON, NAMED):
        await create(rows, new_run(pipeline(), tenant, scheduled_at=time))
    for next_run_at in (SOON, None):
        await rows.connection.execute(
            "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id,"
            " priority, overlap, catch_up, catch_up_seconds, next_run_at)"
            " VALUES ($1, $2, 'm', $3, 'UTC', '{}', 'tenant', '', 1, 'skip', 'one', 0, $4)",
            new_id(), tenant, SELDOM, next_run_at,
        )  # fmt: skip


async def written(rows: Rows, tenant: str) -> dict[Any, str]:
    """By id: the row, and the transaction that wrote it."""
    found: dict[Any, str] = {}
    for table in moves.DUE:
        query = f"SELECT x.id, x.xmin::text || to_jsonb(x)::text AS row FROM {table} x WHERE tenant_id = $1"
        found |= {row["id"]: row["row"] for row in await rows.connection.fetch(query, tenant)}
    return found


async def due(rows: Rows, tenant: str) -> dict[Any, datetime]:
    found: dict[Any, datetime] = {}
    for table, column in moves.DUE.items():
        query = f"SELECT id, {column} AS due FROM {table} WHERE tenant_id = $1 AND {column} IS NOT NULL"
        found |= {row["id"]: row["due"] for row in await rows.connection.fetch(query, tenant)}
    return found


async def test_a_move_postpones_what_waits_for_a_time_and_when_it_is_undone_all_is_due_as_before(rows: Rows) -> None:
    for tenant in ("t", "u"):
        await things_of(rows, tenant)
    before, bystanders, rows_before = await due(rows, "t"), await written(rows, "u"), await written(rows, "t")
    waiting = {
        row["id"]
        for row in await rows.connection.fetch(
            "SELECT id FROM task WHERE tenant_id = 't' AND status = ANY($1) AND available_at < $2"
            " UNION SELECT id FROM schedule WHERE tenant_id = 't' AND next_run_at IS NOT NULL",
            WAITS, NAMED,
        )
    }  # fmt: skip
    await hold_new_work(rows.connection, "t")
    assert await due(rows, "t") == {
        one: time + A_THOUSAND_YEARS if one in waiting else time for one, time in before.items()
    }
    rows_after = await written(rows, "t")
    assert {one for one in rows_before if rows_before[one] != rows_after[one]} == waiting
    await hold_new_work(rows.connection, "t")  # as after a kill: what has been postponed is not even written again
    assert await written(rows, "t") == rows_after
    for _ in range(2):  # what has come back stays where it is
        async with rows.connection.transaction():
            await release(rows.connection, "t")
        assert await due(rows, "t") == before
    assert await written(rows, "u") == bystanders


async def test_a_move_that_begins_does_not_deadlock_with_a_submission(rows: Rows, another: Open) -> None:
    """A submission writes the job, and then its tasks."""
    other = (await another()).connection
    async with rows.connection.transaction():
        await rows.connection.execute("LOCK TABLE job IN ROW EXCLUSIVE MODE")
        holding = asyncio.create_task(hold_new_work(other, "t"))
        await until_waiting(rows.connection, kind="relation")
        await rows.connection.execute("LOCK TABLE task IN ROW EXCLUSIVE MODE NOWAIT")
    await holding


async def test_a_move_that_is_undone_leaves_the_due_times_of_another_tenant_that_moves(rows: Rows) -> None:
    for tenant in ("t", "u"):
        await things_of(rows, tenant)
    for tenant in ("t", "u"):
        await hold_new_work(rows.connection, tenant)
    theirs = await written(rows, "u")
    async with rows.connection.transaction():
        await release(rows.connection, "t")
    assert await written(rows, "u") == theirs


async def test_a_tenant_stays_until_its_own_rows_are_copied_out_of_the_cell(rows: Rows) -> None:
    stages = {"drains": "drain", "is copied": "copy", "switches": "switch", "has moved": "moved", "came": "live"}
    for tenant, stage in stages.items():
        await rows.connection.execute(
            "INSERT INTO tenant_move (tenant_id, from_cell, to_cell, direction, stage) VALUES ($1, 'a', 'b', $2, $3)",
            tenant, "in" if stage == "live" else "out", stage,
        )  # fmt: skip
    stay = await rows.connection.fetch(
        f"SELECT tenant FROM unnest($1::text[]) AS tenant WHERE {moves.tenant_stays('tenant')}",
        [*stages, "never moved"],
    )
    assert [row["tenant"] for row in stay] == ["drains", "came", "never moved"]


async def running_before_what_follows(rows: Rows, what: str) -> Claimed | Suspending:
    """A step, or a workflow that suspends, after which its worker would go on with another step of the job."""
    if what == "the next step":
        return await rows.leased(THREE)
    if what == "the workflow":
        await suspended(rows, step(1), ends=1)
        (child,) = await children(rows)
        return child
    call = step(1)
    return Suspending((await rows.leased()).lease, (call,), 0, 1, step_to_claim=call.child)


async def settle(rows: Rows, what: Claimed | Suspending) -> Settled:
    if isinstance(what, Suspending):
        return await settlements.suspend(rows.connection, [what], rows.terms)
    return await settlements.complete(rows.connection, [Completion(what.lease, claim_next=True)], rows.terms)


@pytest.mark.parametrize("what", ["the next step", "the workflow", "the step of a workflow"])
async def test_a_worker_does_not_go_on_with_a_job_of_a_tenant_that_moves(rows: Rows, what: str) -> None:
    """Else the steps of a workflow in a loop would follow one another, and the move would never end."""
    ending = await running_before_what_follows(rows, what)
    await hold_new_work(rows.connection, "t")
    settled = await settle(rows, ending)
    assert settled.next_steps == {}
    (hint,) = settled.announcements
    left = await rows.task(hint.hint.task_id)
    is_workflow = what == "the workflow"
    claims_before = int(is_workflow)
    assert (left["status"], left["lease_owner"], left["lease_until"], left["epoch"], left["attempt"]) == (
        "waiting" if is_workflow else "pending", None, None, claims_before, 0,
    )  # fmt: skip
    assert (left["started_at"] is not None) == is_workflow
    assert left["available_at"].year > 2900
    assert await rows.claim_all() == []
    await assert_history(rows, left["job_id"])
    async with rows.connection.transaction():
        await release(rows.connection, "t")
    assert await rows.connection.fetchval("SELECT count(*) FROM pg_proc WHERE starts_with(proname, 'moving_')") == 0
    (claimed,) = await rows.claim_all()
    assert (claimed.lease.task_id, claimed.lease.epoch, claimed.lease.attempt) == (left["id"], claims_before + 1, 1)
    settled = await settle(rows, await running_before_what_follows(rows, what))
    assert len(settled.next_steps) == 1, "the move is undone"
    await assert_history(rows, left["job_id"])


@pytest.mark.parametrize("what", ["the next step", "the workflow", "the step of a workflow"])
async def test_a_worker_goes_on_with_a_job_of_another_tenant(rows: Rows, what: str) -> None:
    await hold_new_work(rows.connection, "u")
    settled = await settle(rows, await running_before_what_follows(rows, what))
    assert len(settled.next_steps) == 1


async def test_a_claim_in_the_moment_before_the_due_times_are_postponed_is_one(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that gets it runs the task."""

    async def not_yet(*_: Any) -> None: ...

    monkeypatch.setattr(moves, "postpone", not_yet)
    workflow = await suspended(rows, delay=0.0)
    await rows.submit()
    await hold_new_work(rows.connection, "t")
    claimed = await rows.claim_all()
    assert len(claimed) == 2
    assert {(await rows.task(one.lease.task_id))["status"] for one in claimed} == {"running"}
    assert workflow.lease.task_id in {one.lease.task_id for one in claimed}
