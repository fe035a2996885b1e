"""Who looks for what is due does not read what is not: neither a million finished jobs that are still kept, nor a
hundred thousand tasks that wait for their next poll, cost a look or a sweep anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from leasehold.broker import outbox
from leasehold.db import scaling_reads
from leasehold.db.database import Connection
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.registry import Pipelines
from leasehold.evaluation.templates import Templates
from leasehold.limits import downloads, rates
from leasehold.pipelines.generation import rows as generations
from leasehold.pipelines.media.housekeeping import jobless_pictures
from leasehold.runtime.pacing import PIECE_SIZE
from leasehold.schedules import firing as schedules
from leasehold.transitions import claims, concurrency, jobs, notes, progress, settlements, sweeps, unknown_tasks, wakes
from leasehold.transitions.progress import Progress
from leasehold.transitions.settlements import Completion, Failure, FanningOut, Part, Snoozing
from tests.factories import THREE, Rows
from tests.transitions.conftest import Open

MANY = 1000
#: What an index scan may read beside: its own first entries, and what a loose scan jumps to.
FEW = 20
LATER = "clock_timestamp() + interval '1 day'"
#: How far back a look goes, in seconds: what is due since a moment, and not what was due a minute ago.
WINDOW = 30.0

Look: TypeAlias = Callable[[Rows], Awaitable[Any]]
Work: TypeAlias = Callable[[], Awaitable[Any]]
Prepare: TypeAlias = Callable[[Rows], Awaitable[Work]]


def on_connection(work: Callable[[Connection], Awaitable[Any]]) -> Look:
    return lambda rows: work(rows.connection)


async def fire_due(connection: Connection) -> Any:
    created_runs, has_more = await schedules.fire_due(connection, Templates(Pipelines()), 60)
    return created_runs or has_more


FOR_EACH = f"FROM generate_series(1, {MANY}) AS n"
#: The index -> rows of it that are not due, and the look for those that are.
CASES: dict[str, tuple[str, Look]] = {
    "task_runnable": (f"UPDATE task SET status = 'waiting', available_at = {LATER}", Rows.claim_all),
    "outbox_relay_at": (
        f"""INSERT INTO outbox (task_id, job_id, queue, priority, relay_at)
        SELECT gen_random_uuid(), gen_random_uuid(), 'q', 1, {LATER} {FOR_EACH}""",
        on_connection(lambda c: outbox.take(c, 10)),
    ),
    "outbox_batch_relay_at": (
        f"INSERT INTO outbox_batch (task_ids, relay_at) SELECT ARRAY[gen_random_uuid()], {LATER} {FOR_EACH}",
        on_connection(lambda c: outbox.split(c, 10)),
    ),
    "job_overdue": (f"UPDATE job SET deadline_at = {LATER}", on_connection(sweeps.expire_jobs)),
    "job_expires": (
        f"UPDATE job SET status = 'cancelled', finished_at = clock_timestamp(), expires_at = {LATER}",
        on_connection(sweeps.forgettable_jobs),
    ),
    "media_expires": (
        f"""INSERT INTO media (id, tenant_id, content_type, original_key, file_name, expires_at)
        SELECT gen_random_uuid(), 't', 'image/jpeg', n::text, '', {LATER} {FOR_EACH}""",
        on_connection(jobless_pictures),
    ),
    "idempotency_expires": (
        f"""INSERT INTO idempotency (tenant_id, key, request_hash, locked_until, expires_at)
        SELECT 't', n::text, '', {LATER}, {LATER} {FOR_EACH}""",
        on_connection(sweeps.forget_idempotency_keys),
    ),
    "schedule_due": (
        f"""INSERT INTO schedule (id, tenant_id, template, cron, timezone, payload_template, scope, scope_id, priority,
        overlap, catch_up, catch_up_seconds, next_run_at)
        SELECT gen_random_uuid(), 't', 'x', '* * * * *', 'UTC', 'null', 'tenant', '', 1, 'skip', 'skip', 60,
        {LATER} {FOR_EACH}""",
        on_connection(fire_due),
    ),
    "gate_job_line": (
        f"""WITH made AS (INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, steps_left, event_seq,
        params, inputs, output_prefix, held, gated) SELECT gen_random_uuid(), 't', 'one', 1, 'pending', 1, 1, '{{}}',
        '{{}}', 'x', true, true {FOR_EACH} RETURNING id
        ), limits AS (INSERT INTO gate (tenant_id, key, at_most) VALUES ('t', 'k', 1))
        INSERT INTO gate_job (tenant_id, key, job_id, priority, ready_at, owner)
        SELECT 't', 'k', id, 1, {LATER}, 't' FROM made""",
        on_connection(lambda c: concurrency.admit(c, [("t", "k")], ())),
    ),
    "rate_bucket_full_at": (
        f"INSERT INTO rate_bucket (key, full_at) SELECT n::text, {LATER} {FOR_EACH}",
        on_connection(rates.forget_rates),
    ),
    "download_started": (
        f"""INSERT INTO download (id, tenant_id, key_prefix, bytes, lapses_at)
        SELECT gen_random_uuid(), 't', 'k', 1, {LATER} {FOR_EACH}""",
        on_connection(downloads.forget_downloads),
    ),
    "source_image_expires": (
        f"INSERT INTO source_image (key, tenant_id, expires_at) SELECT n::text, 't', {LATER} {FOR_EACH}",
        on_connection(generations.expired_sources),
    ),
}


async def entries_read(rows: Rows, index: str) -> int:
    """Of any index of its table."""
    return await counted(
        rows,
        "SELECT sum(i.idx_tup_read)::int FROM pg_stat_user_indexes i"
        " WHERE i.relid = (SELECT x.relid FROM pg_stat_user_indexes x WHERE x.indexrelname = $1)",
        index,
    )


async def counted(rows: Rows, query: str, of: Any) -> int:
    """By PostgreSQL, up to this moment."""
    await rows.connection.execute("SELECT pg_stat_force_next_flush()")
    await rows.connection.execute("SELECT pg_stat_clear_snapshot()")
    read: int = await rows.connection.fetchval(query, of)
    return read


async def vacuum(rows: Rows) -> None:
    """Remove all dead rows. VACUUM leaves those that a snapshot may still see, such as that of an autovacuum."""
    async with asyncio.timeout(60):
        while True:
            await rows.connection.execute("VACUUM")
            if not await rows.connection.fetchval("SELECT sum(n_dead_tup) FROM pg_stat_user_tables"):
                return
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("index", CASES)
async def test_a_look_for_what_is_due_reads_nothing_of_what_is_not(rows: Rows, index: str) -> None:
    prepare, look = CASES[index]
    if prepare.startswith("UPDATE"):
        await rows.submit(count=MANY)
    await rows.connection.execute(prepare)
    await vacuum(rows)  # what the preparation left
    before = await entries_read(rows, index)
    assert not await look(rows)
    assert await entries_read(rows, index) - before <= FEW


async def test_what_waits_for_its_time_costs_the_scaling_of_its_pool_nothing(rows: Rows) -> None:
    await rows.submit(count=MANY)
    await rows.connection.execute(f"UPDATE task SET status = 'waiting', available_at = {LATER}")
    await rows.submit()
    await vacuum(rows)
    before = await entries_read(rows, "task_runnable")
    assert [row["due"] for row in await scaling_reads.due_tasks(rows.connection, ["default"])] == [1]
    assert await scaling_reads.running_attempts(rows.connection, ["default"]) == []
    assert await entries_read(rows, "task_runnable") - before <= FEW


async def test_a_poll_reads_nothing_of_what_went_through_before_its_window(rows: Rows, another: Open) -> None:
    """While an old snapshot keeps all of it in the index."""
    old = (await another()).connection
    async with old.transaction(isolation="repeatable_read"):
        await old.fetchval("SELECT count(*) FROM task")
        await rows.submit(count=MANY)
        while taken := await rows.claim_all():
            await settlements.complete(rows.connection, [Completion(claimed.lease) for claimed in taken])
        before = await entries_read(rows, "task_runnable")
        assert not (await claims.poll(rows.connection, rows.terms, ["default"], 10, back=0.0)).claimed
        assert await entries_read(rows, "task_runnable") - before <= FEW


@pytest.mark.parametrize("sweep", [sweeps.expire_jobs, lambda connection: sweeps.end_cancels(connection, [], 5)])
async def test_a_sweep_reads_nothing_of_what_has_ended(rows: Rows, another: Open, sweep: Any) -> None:
    """Whatever an old snapshot keeps, and whichever index the statistics speak for."""
    old = (await another()).connection
    async with old.transaction(isolation="repeatable_read"):
        await old.fetchval("SELECT count(*) FROM task")
        await rows.submit(count=MANY)
        await rows.connection.execute(f"UPDATE job SET deadline_at = {LATER}")
        while taken := await rows.claim_all():
            await settlements.complete(rows.connection, [Completion(claimed.lease) for claimed in taken])
        await rows.connection.execute("ANALYZE job, task")
        before = await entries_read(rows, "job_overdue"), await entries_read(rows, "task_running")
        assert not await sweep(rows.connection)
        after = await entries_read(rows, "job_overdue"), await entries_read(rows, "task_running")
        assert sum(after) - sum(before) <= FEW


async def _look(rows: Rows) -> Work:
    await rows.submit()
    return lambda: claims.poll(rows.connection, rows.terms, ["default"], 10, back=WINDOW)


async def _look_among_tenants(rows: Rows) -> Work:
    for tenant in ("t", "u"):
        await rows.submit(tenant=tenant)
    return lambda: claims.poll(rows.connection, rows.terms, ["default"], 10, back=WINDOW, running={"t": 1})


async def _claim(rows: Rows) -> Work:
    (hint,) = await rows.submit()
    return lambda: claims.claim(rows.connection, rows.terms, [hint.hint.task_id])


async def _announce(rows: Rows) -> Work:
    (hint,) = await rows.submit()
    return lambda: outbox.delete_confirmed(rows.connection, [hint])


async def _relay(rows: Rows) -> Work:
    await rows.submit()
    await rows.connection.execute("UPDATE outbox SET relay_at = clock_timestamp()")
    return lambda: outbox.take(rows.connection, 10, WINDOW)


async def _relay_batch(rows: Rows) -> Work:
    await rows.submit(count=2)
    await rows.connection.execute("UPDATE outbox_batch SET relay_at = clock_timestamp()")
    return lambda: outbox.split(rows.connection, 10, WINDOW)


async def _renew(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: claims.renew(rows.connection, rows.terms.owner, [lease], 30.0)


async def _complete(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: settlements.complete(rows.connection, [Completion(lease)])


async def _complete_and_go_on(rows: Rows) -> Work:
    lease = (await rows.leased(THREE)).lease
    return lambda: settlements.complete(rows.connection, [Completion(lease, claim_next=True)], rows.terms)


async def _fail(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: settlements.fail(rows.connection, [Failure(lease, "error", "x", "", True, 60.0)])


async def _park(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: settlements.snooze(rows.connection, [Snoozing(lease, 60.0)])


async def _release(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: settlements.release(rows.connection, [lease])


async def _cancel(rows: Rows) -> Work:
    claimed = await rows.leased()
    return lambda: jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="", by="test")


async def _hear(rows: Rows) -> Work:
    claimed = await rows.leased()
    await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="", by="test")
    return lambda: claims.to_cancel(rows.connection, rows.terms.owner, [claimed.lease.task_id])


async def _acknowledge(rows: Rows) -> Work:
    claimed = await rows.leased()
    await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="", by="test")
    return lambda: settlements.acknowledge_cancel(rows.connection, [claimed.lease])


async def _replay(rows: Rows) -> Work:
    claimed = await rows.leased()
    await settlements.fail(rows.connection, [Failure(claimed.lease, "error", "x", "", False, 0.0)])
    return lambda: jobs.replay(rows.connection, claimed.job_id, "t")


async def _wake(rows: Rows) -> Work:
    claimed = await rows.leased()
    await settlements.snooze(rows.connection, [Snoozing(claimed.lease, 60.0)])
    return lambda: wakes.wake(rows.connection, claimed.job_id, "t", "only")


async def _wake_known(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    await settlements.snooze(rows.connection, [Snoozing(lease, 60.0, missing_handler="one.only")])
    return lambda: unknown_tasks.wake_known(rows.connection, rows.terms.owner, ["default"], ["one.only"], 10)


async def _say(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: progress.report(rows.connection, [Progress(lease, 1.0, "")])


async def _remember(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    return lambda: notes.remember(rows.connection, lease, {"a": 1})


async def _spread(rows: Rows) -> Work:
    lease = (await rows.leased()).lease
    part = Part("part", "default", 1, "one.only", 1)
    return lambda: settlements.fan_out(rows.connection, [FanningOut(lease, [part])])


async def _admit(rows: Rows) -> Work:
    async with rows.connection.transaction():
        await rows.submit(limits=[ConcurrencyLimit("t", "tenant", at_most=1)])
    return lambda: concurrency.admit(rows.connection, [("t", "tenant")], ())


async def _end_cancels(rows: Rows) -> Work:
    claimed = await rows.leased()
    await jobs.request_cancel(rows.connection, [claimed.job_id], "t", reason="", by="test")
    return lambda: sweeps.end_cancels(rows.connection, [rows.terms.owner], 5)


async def _expire_jobs(rows: Rows) -> Work:
    claimed = await rows.leased()
    await rows.connection.execute("UPDATE job SET deadline_at = now() WHERE id = $1", claimed.job_id)
    return lambda: sweeps.expire_jobs(rows.connection)


VERBS = (
    _look, _look_among_tenants, _claim, _announce, _relay, _relay_batch, _renew, _complete, _complete_and_go_on,
    _fail, _park, _release, _cancel, _hear, _acknowledge, _replay, _wake, _wake_known,
    _say, _remember, _spread, _admit, _end_cancels, _expire_jobs,
)  # fmt: skip
#: Rows and entries that a verb may read of a job of one step, beside a thousand that are over.
OF_ONE_JOB = 60


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__.strip("_"))
async def test_a_verb_reads_nothing_but_its_own_job(rows: Rows, another: Open, verb: Prepare) -> None:
    """While an old snapshot keeps what went through, and the statistics say that nothing is left to do: then an index
    of what is left seems short, and to read all of it cheaper than to look a row up.
    """
    old = (await another()).connection
    await rows.submit(count=MANY)
    await rows.connection.execute("UPDATE task SET available_at = available_at - interval '1 minute'")
    for n in (1, 2):
        await rows.connection.execute("UPDATE outbox_batch SET relay_at = relay_at - interval '1 minute'")
        if n == 1:  # half of the hints become rows of `outbox`
            await outbox.split(rows.connection, MANY // PIECE_SIZE // 2)
    await rows.connection.execute("UPDATE outbox SET relay_at = relay_at - interval '1 minute'")
    await vacuum(rows)
    async with old.transaction(isolation="repeatable_read"):
        await old.fetchval("SELECT count(*) FROM task")
        while taken := await rows.claim_all():
            await settlements.complete(rows.connection, [Completion(claimed.lease) for claimed in taken])
        await rows.connection.execute("DELETE FROM outbox")
        await rows.connection.execute("DELETE FROM outbox_batch")
        await rows.connection.execute("ANALYZE job, task, outbox, outbox_batch")
        work = await verb(rows)
        before = await rows_read(rows)
        assert await work() != []
        assert await rows_read(rows) - before <= OF_ONE_JOB


async def rows_read(rows: Rows) -> int:
    """Entries of indexes, and rows of tables that were read from end to end."""
    return await counted(
        rows,
        "SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname = ANY($1))::int"
        " + (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE relname = ANY($1))::int",
        ["job", "task", "outbox", "outbox_batch"],
    )


async def test_a_look_says_how_long_the_oldest_that_it_saw_has_been_due(rows: Rows) -> None:
    """Also of what it could not take, so that the next look goes back far enough."""
    assert (await claims.poll(rows.connection, rows.terms, ["default"], 10)).oldest is None
    for hint, minutes in zip(await rows.submit(count=2), (10, 20), strict=True):
        await rows.connection.execute(
            "UPDATE task SET available_at = available_at - make_interval(mins => $2) WHERE id = $1",
            hint.hint.task_id,
            minutes,
        )
    near = await claims.poll(rows.connection, rows.terms, ["default"], 10, back=15 * 60)
    assert len(near.claimed) == 1
    assert near.oldest == pytest.approx(10 * 60, abs=60)
    far = await claims.poll(rows.connection, rows.terms, ["default"], 10)
    assert len(far.claimed) == 1
    assert far.oldest == pytest.approx(20 * 60, abs=60)


async def test_a_look_counts_what_runs_only_where_tenants_take_turns(rows: Rows) -> None:
    """And only when it is not told."""

    async def look(running: dict[str, int] | None = None) -> claims.Polled:
        return await claims.poll(rows.connection, rows.terms, ["default"], 1, running=running)

    await rows.submit(count=3)
    assert (await look()).running is None
    await rows.submit(tenant="u")
    assert (await look({})).running is None
    assert (await look()).running == {"t": 2}


async def test_a_tenant_that_has_more_running_comes_later(rows: Rows) -> None:
    await rows.submit()
    await rows.submit(tenant="u")
    looked = await claims.poll(rows.connection, rows.terms, ["default"], 1, running={"t": 1})
    assert [claimed.tenant_id for claimed in looked.claimed] == ["u"]
