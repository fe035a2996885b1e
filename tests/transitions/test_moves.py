"""While a tenant moves to another cell nothing of it becomes due here; if the move is undone, everything is due when it
was. The rows of other tenants, and those that wait for no time, are not even written.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.cli.moving_rows import hold_new_work, release
from leasehold.domain.ids import new_id
from leasehold.domain.states import TaskState
from leasehold.transitions import moves
from tests.factories import SELDOM, Rows
from tests.transitions.test_matrix import put_into
from tests.transitions.test_runs_beside_others import create, new_run, pipeline

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
