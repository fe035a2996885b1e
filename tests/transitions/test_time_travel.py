"""A test of an app may let time pass: everything that waits for a time is then due so much earlier."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.ids import new_id
from leasehold.domain.states import TaskState
from leasehold.transitions.time_travel import _MOVED, end_leases, let_pass
from tests.factories import ONE, SELDOM, THREE, Rows
from tests.transitions.test_matrix import put_into

TIME = timedelta(hours=2)
#: Why an instant stays when time passes -> the columns of which that is true.
STAYS: dict[str, set[str]] = {
    "a living process renews it by the real clock": {
        "task.lease_until", "leadership.until", "worker.incarnation", "worker.started_at", "worker.seen_at",
        "known_handler.seen_at",
    },
    "it names a tick, and is compared with no clock": {"run.tick", "schedule.buffered_at", "schedule.last_run_at"},
    "it only says when something was written: nothing becomes due by it but its deletion": {
        "event.at", "kept_event.at", "failure.at", "progress.at", "job_log.at", "job_stream.at", "settlement.at",
        "tombstone.at", "operation_refusal.at", "audit.at", "paused_queue.at", "schedule.created_at",
        "template.created_at", "webhook.created_at", "webhook.disabled_at", "callback_secret.created_at",
        "saved_view.saved_at", "quarantine.failed_at", "tenant_move.started_at",
    },
    "a worker that runs would soon find the task also without the hint": {
        "outbox.created_at", "outbox.relay_at", "outbox_batch.created_at", "outbox_batch.relay_at",
    },
    "who may sign in is no matter of an app's test": {
        "api_key.created_at", "api_key.expires_at", "api_key.revoked_at", "api_key.last_used_at", "person.created_at",
        "person.seen_at", "person.disabled_at", "person.sessions_ended_at",
    },
    "bytes are on their way by the clocks of a client and of the store": {
        "upload.writable_until", "upload.look_at", "upload.forget_at", "download.started_at", "download.lapses_at",
        "download.finished_at",
    },
    "it is of a kind of work that ships with the platform: the testing kit runs an app's": {
        "conversion.promoting_until", "promoted_object.until", "expired_conversion.forgotten_at",
        "generation.created_at", "generation.consumed_at", "source_image.expires_at", "media.created_at",
        "media.updated_at", "media.expires_at", "media.deleted_at",
    },
}  # fmt: skip
_INSTANTS = """
SELECT c.relname || '.' || a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
  AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype)
"""


async def test_each_instant_of_the_database_moves_or_stays_for_a_reason(rows: Rows) -> None:
    moved = [f"{table}.{column}" for table, columns in _MOVED.items() for column in columns]
    named = [*moved, "schedule.next_run_at", *(column for columns in STAYS.values() for column in columns)]
    assert sorted(named) == sorted(row[0] for row in await rows.connection.fetch(_INSTANTS))


async def schedule(rows: Rows, next_run_at: datetime | None) -> None:
    await rows.connection.execute(
        "INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id,"
        " priority, overlap, catch_up, catch_up_seconds, next_run_at)"
        " VALUES ($1, 't', 'm', $2, 'UTC', '{}', 'tenant', '', 1, 'skip', 'one', 0, $3)",
        new_id(), SELDOM, next_run_at,
    )  # fmt: skip


async def test_when_time_passes_jobs_their_places_at_limits_and_rates_are_so_much_older(rows: Rows) -> None:
    async with rows.connection.transaction():
        await rows.submit(limits=[ConcurrencyLimit("t", "k", at_most=1)])
    c = rows.connection
    await c.execute("UPDATE job SET deadline_at = now(), expires_at = now(), cancel_by = now()")
    await c.execute("UPDATE gate_job SET admitted_at = clock_timestamp()")
    await c.execute("INSERT INTO rate_bucket (key, full_at) VALUES ('k', now())")
    await c.execute(
        "INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id, scheduled_at)"
        " SELECT id, tenant_id, pipeline, 1, 'tenant', '', now() FROM job"
    )

    async def due() -> tuple[Any, ...]:
        query = (
            "SELECT deadline_at, expires_at, cancel_by, available_at, ready_at, admitted_at, full_at, scheduled_at"
            " FROM job, task, gate_job, rate_bucket, run"
        )
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
