"""A test of an app may let time pass: everything that waits for a time is then due so much earlier."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.domain.states import TaskState
from leasehold.transitions.time_travel import end_leases, let_pass
from tests.factories import ONE, SELDOM, THREE, Rows
from tests.transitions.test_matrix import put_into

TIME = timedelta(hours=2)


async def schedule(rows: Rows, next_run_at: datetime | None) -> None:
    await rows.connection.execute(
        "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id,"
        " priority, overlap, catch_up, catch_up_seconds, next_run_at)"
        " VALUES ($1, 't', 'm', $2, 'UTC', '{}', 'tenant', '', 1, 'skip', 'one', 0, $3)",
        new_id(), SELDOM, next_run_at,
    )  # fmt: skip


async def test_when_time_passes_jobs_and_their_places_at_limits_are_so_much_older(rows: Rows) -> None:
    async with rows.connection.transaction():
        await rows.submit(limits=[ConcurrencyLimit("t", "k", at_most=1)])
    await rows.connection.execute("UPDATE job SET deadline_at = clock_timestamp(), expires_at = clock_timestamp()")
    await rows.connection.execute("UPDATE gate_job SET admitted_at = clock_timestamp()")

    async def due() -> tuple[Any, ...]:
        query = "SELECT deadline_at, expires_at, available_at, ready_at, admitted_at FROM job, task, gate_job"
        return tuple(await rows.connection.fetchrow(query) or ())

    before = await due()
    await let_pass(rows.connection, TIME)
    assert await due() == tuple(time - TIME for time in before)


async def test_when_time_passes_all_instants_of_a_run_are_so_much_older(rows: Rows) -> None:
    """Each by the same time: what a workflow reads at a replay differs from nothing else that it reads."""
    job_id, _ = await put_into(rows, TaskState.SUCCEEDED)
    await schedule(rows, None)  # its change and the runs after it keep their order
    c = rows.connection
    await c.execute(
        "UPDATE job SET started_at = clock_timestamp(), cancel = jsonb_build_object('by', 'b', 'at', now())"
    )
    await c.execute("INSERT INTO signal (job_id, tenant_id, name, payload) VALUES ($1, 't', 'go', '1')", job_id)
    await c.executemany(
        "INSERT INTO journal (job_id, branch, number, kind, name, state, value, due_at, epoch)"
        " VALUES ($1, '', $2, $3, 'n', $4, $5, clock_timestamp(), 1)",
        [
            (job_id, 1, "sleep", "done", None),
            (job_id, 2, "signal", "done", {"value": 7, "at": datetime.now(UTC).isoformat()}),
            (job_id, 3, "call", "done", {"value": 7}),
        ],
    )

    async def instants() -> list[Any]:
        query = (
            "SELECT j.created_at, j.started_at, j.finished_at, (j.cancel ->> 'at')::timestamptz, t.started_at,"
            " t.finished_at, s.at, e.at, e.due_at, (e.value ->> 'at')::timestamptz, x.updated_at"
            " FROM job j, task t, signal s, journal e, schedule x ORDER BY e.number"
        )
        return [tuple(row) for row in await c.fetch(query)]

    before = await instants()
    await let_pass(c, TIME)
    assert await instants() == [tuple(None if time is None else time - TIME for time in row) for row in before]
    assert await c.fetchval("SELECT value FROM journal WHERE kind = 'call'") == {"value": 7}


async def test_an_expiry_in_the_parameters_moves_in_the_pipelines_that_have_one(rows: Rows) -> None:
    """An argument of another app's task that has the name is not the platform's."""
    expiry = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for expires in (expiry.isoformat(), None):
        await rows.submit(ONE, params={"expires": expires})
    await rows.submit(THREE, params={"expires": expiry.isoformat()})
    await let_pass(rows.connection, TIME, [ONE.name])
    query = "SELECT pipeline, (params ->> 'expires')::timestamptz FROM job WHERE params ->> 'expires' IS NOT NULL"
    moved = {tuple(row) for row in await rows.connection.fetch(query)}
    assert moved == {(ONE.name, expiry - TIME), (THREE.name, expiry)}


async def test_a_tick_that_time_has_passed_is_due_now_and_not_missed_and_a_paused_schedule_stays_paused(
    rows: Rows,
) -> None:
    now = datetime.now(UTC)
    missed, soon, later = now - TIME, now + TIME / 2, now + 2 * TIME
    for tick in (missed, soon, later, None):
        await schedule(rows, tick)
    await let_pass(rows.connection, TIME)
    ticks = await rows.connection.fetch("SELECT next_run_at FROM schedule ORDER BY next_run_at")
    assert [row["next_run_at"] for row in ticks if row["next_run_at"] != ticks[1]["next_run_at"]] == [
        missed, later - TIME, None
    ]  # fmt: skip
    assert now <= ticks[1]["next_run_at"] <= await rows.connection.fetchval("SELECT clock_timestamp()")


async def test_when_all_workers_have_died_only_what_ran_has_a_lease_that_has_ended(rows: Rows) -> None:
    for state in TaskState:
        await put_into(rows, state)
    await rows.connection.execute(
        "UPDATE task SET lease_until = clock_timestamp() + interval '1 hour' WHERE status = 'running'"
    )
    await rows.connection.execute("INSERT INTO leadership VALUES ('r', $1, 'infinity')", new_id())
    await end_leases(rows.connection)
    leases = await rows.connection.fetch("SELECT status, lease_until < now() AS ended FROM task ORDER BY 2")
    assert {row["status"]: row["ended"] for row in leases} == {
        state.value: True if state is TaskState.RUNNING else None for state in TaskState
    }
    assert await rows.connection.fetchval("SELECT count(*) FROM leadership") == 0
