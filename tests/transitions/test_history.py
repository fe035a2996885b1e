"""What happened to a job is kept for as long as the job is, whatever becomes of the days that it happened in."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from leasehold.db import history
from leasehold.db.database import Connection
from leasehold.transitions import jobs, settlements, sweeps
from leasehold.transitions.settlements import Failure
from tests.factories import THREE, Rows
from tests.transitions.conftest import Open

OLD = 20
_EXCLUSIVE_LOCKS = (
    "SELECT count(*) FROM pg_locks WHERE relation = 'event'::regclass AND mode = 'AccessExclusiveLock' AND granted"
)
#: Asked once: midnight may come between two lines of a test.
TODAY = datetime.now(UTC).date()


def day_of(days: int) -> date:
    return TODAY - timedelta(days=days)


async def make_day(rows: Rows, days: int = OLD) -> str:
    """A partition of that day, as a sweeper made it then."""
    day = day_of(days)
    name = f"event_{day:%Y%m%d}"
    bounds = f"FROM ('{day} 00:00+00') TO ('{day + timedelta(1)} 00:00+00')"
    await rows.connection.execute(f"CREATE TABLE {name} PARTITION OF event FOR VALUES {bounds}")
    return name


async def age(rows: Rows, *job_ids: UUID, days: int = OLD) -> None:
    """As if all that has happened to them so far had happened so many days ago."""
    day = day_of(days)
    await rows.connection.execute(
        "UPDATE event SET at = $2::date + interval '12 hours' + seq * interval '1 ms' WHERE job_id = ANY($1::uuid[])",
        list(job_ids),
        day,
    )


async def submitted(rows: Rows, count: int) -> list[UUID]:
    """New jobs of several steps: each has a row for each of its events."""
    before = {row["id"] for row in await rows.connection.fetch("SELECT id FROM job")}
    await rows.submit(THREE, count=count)
    return [row["id"] for row in await rows.connection.fetch("SELECT id FROM job") if row["id"] not in before]


async def at_times(rows: Rows, *times: tuple[datetime, ...]) -> list[UUID]:
    """New jobs, in the order of their ids. Each has an event at each of its times, and no other event."""
    job_ids = sorted(await submitted(rows, len(times)))
    for job_id, (first, *others) in zip(job_ids, times, strict=True):
        await rows.connection.execute("UPDATE event SET at = $2 WHERE job_id = $1", job_id, first)
        await rows.connection.execute(
            "INSERT INTO event SELECT"
            " (jsonb_populate_record(e, jsonb_build_object('seq', other.nth + 1, 'at', other.instant))).*"
            " FROM event e, unnest($2::timestamptz[]) WITH ORDINALITY AS other (instant, nth) WHERE e.job_id = $1",
            job_id, others,
        )  # fmt: skip
    return job_ids


async def times_in(rows: Rows, table: str) -> set[tuple[UUID, datetime]]:
    return {(row["job_id"], row["at"]) for row in await rows.connection.fetch(f"SELECT job_id, at FROM {table}")}


async def ended(rows: Rows) -> UUID:
    """A job of several steps that has succeeded, and may be forgotten at once."""
    claimed = [await rows.leased(THREE, keep_seconds=0)]
    job_id = claimed[0].job_id
    while claimed:
        await settlements.complete(rows.connection, [settlements.Completion(lease.lease) for lease in claimed])
        claimed = await rows.claim_all()
    return job_id


async def sweep(rows: Rows, days_kept: int = 8) -> None:
    while await history.keep_event_days(rows.connection, days_ahead=0, days_kept=days_kept):
        pass


async def told(rows: Rows, job_id: UUID) -> list[dict[str, object]]:
    found = await rows.connection.fetch("SELECT * FROM history WHERE job_id = $1 ORDER BY seq", job_id)
    return [dict(row) for row in found]


@pytest.mark.parametrize("has_day", [True, False])
async def test_a_job_that_still_exists_loses_nothing_when_its_day_is_dropped(rows: Rows, has_day: bool) -> None:
    """Also where no sweeper ran that day, and its events lie in the default partition."""
    name = await make_day(rows) if has_day else "event_default"
    first = await rows.leased(THREE)
    await settlements.complete(rows.connection, [settlements.Completion(first.lease)])
    await age(rows, first.job_id)
    assert await rows.connection.fetchval(f"SELECT count(*) FROM {name}") == 3
    before = await told(rows, first.job_id)
    await sweep(rows)
    assert await told(rows, first.job_id) == before
    assert [event["seq"] for event in before] == [1, 2, 3]
    assert await rows.connection.fetchval("SELECT count(*) FROM event") == 0
    if has_day:
        assert await rows.connection.fetchval("SELECT to_regclass($1)", name) is None


async def test_a_life_of_weeks_is_told_in_one_piece(rows: Rows) -> None:
    """Some of it is kept, some lies in a day that is not old yet."""
    for days in (30, OLD):
        await make_day(rows, days)
    claimed = await rows.leased(THREE)
    await age(rows, claimed.job_id, days=30)
    await sweep(rows)
    fail = Failure(claimed.lease, "error", "no_luck", "bad weather", retryable=False, delay=0)
    await settlements.fail(rows.connection, [fail])
    await rows.connection.execute(
        "UPDATE event SET at = at - interval '20 days' WHERE job_id = $1 AND kind = 'failed'", claimed.job_id
    )
    await sweep(rows)
    await jobs.replay(rows.connection, claimed.job_id, "t")
    kinds = [event["kind"] for event in await told(rows, claimed.job_id)]
    assert kinds[:2] == ["submitted", "claimed"]
    assert kinds[-1] == "replayed"
    assert [event["seq"] for event in await told(rows, claimed.job_id)] == list(range(1, len(kinds) + 1))


async def test_jobs_are_kept_for_years_and_their_days_are_not(rows: Rows) -> None:
    """A reader of events locks each day and its index. With a day for each of 3,650, a few readers at once took all of
    PostgreSQL's locks.
    """
    recent, old = await make_day(rows, 30), await make_day(rows, 32)
    claimed = await rows.leased(THREE)
    await age(rows, claimed.job_id, days=32)
    before = await told(rows, claimed.job_id)
    await sweep(rows, days_kept=3651)
    partitions = await history._partitions(rows.connection)
    assert (recent in partitions, old in partitions) == (True, False)
    assert await told(rows, claimed.job_id) == before
    assert [event["kind"] for event in before] == ["submitted", "claimed"]


async def test_one_call_drops_one_day_so_that_other_duties_have_their_turns(rows: Rows) -> None:
    """There may be years of days to drop after an upgrade."""
    names = [await make_day(rows, OLD + number) for number in range(3)]
    has_more, left = [], []
    for _ in range(3):
        has_more.append(await history.keep_event_days(rows.connection, days_ahead=0, days_kept=8))
        left.append(len(set(names) & await history._partitions(rows.connection)))
    assert (has_more, left) == ([True, True, False], [2, 1, 0])


async def test_what_is_kept_goes_with_its_job_and_what_has_no_job_is_not_kept(rows: Rows) -> None:
    await make_day(rows)
    gone, kept = await ended(rows), await ended(rows)
    await age(rows, gone, kept)
    await sweeps.forget_jobs(rows.connection, [gone])
    await sweep(rows)
    found = await rows.connection.fetch("SELECT DISTINCT job_id FROM history")
    assert [row["job_id"] for row in found] == [kept]
    await sweeps.forget_jobs(rows.connection, [kept])
    assert await rows.connection.fetchval("SELECT count(*) FROM history") == 0


async def test_many_jobs_are_moved_a_few_at_a_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_JOBS_AT_ONCE", 3)
    await make_day(rows)
    await age(rows, *await submitted(rows, 10))
    await sweep(rows)
    assert await rows.connection.fetchval("SELECT count(*) FROM kept_event") == 10


async def test_the_events_of_a_day_that_move_are_those_from_its_midnight_to_the_next_one(rows: Rows) -> None:
    """The others have their own day's turn, and the last job of the day is where the next statement goes on."""
    start, end, moment = datetime(2020, 1, 2, tzinfo=UTC), datetime(2020, 1, 3, tzinfo=UTC), timedelta(microseconds=1)
    both, first, last, gone, _before, _after = await at_times(
        rows, (start - moment, start, end - moment, end), (start,), (end - moment,), (start,), (start - moment,), (end,)
    )
    await rows.connection.execute("DELETE FROM job WHERE id = $1", gone)
    everything = await times_in(rows, "event")
    moved = {(both, start), (both, end - moment), (first, start), (last, end - moment)}
    assert await rows.connection.fetchval(history.KEEP, start, end, UUID(int=0), 500) == gone
    assert await times_in(rows, "kept_event") == moved
    assert await times_in(rows, "event") == everything - moved
    assert await rows.connection.fetchval(history.KEEP, start, end, gone, 500) is None, "no job comes after the last"


async def test_the_events_without_a_day_that_are_deleted_are_those_before_the_oldest_day(rows: Rows) -> None:
    """An event at its first midnight is of this day. The events of a job that still exists stay."""
    end, moment = datetime(2020, 1, 3, tzinfo=UTC), timedelta(microseconds=1)
    kept, both, last, after = await at_times(rows, (end - moment, end), (end - moment, end), (end - moment,), (end,))
    await rows.connection.execute("DELETE FROM job WHERE id = ANY($1::uuid[])", [both, last, after])
    assert await rows.connection.fetchval(history.FORGET, end, UUID(int=0), 500) == last
    assert await times_in(rows, "event") == {(kept, end - moment), (kept, end), (both, end), (after, end)}
    assert await rows.connection.fetchval(history.FORGET, end, kept, 500) is None, "no job comes after this one"


async def test_a_day_that_has_events_without_a_day_is_not_made_and_the_days_around_it_are(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make it, PostgreSQL would read these events, and every new event would wait. One at midnight is of the day
    that begins then.
    """
    days = [day_of(-number) for number in range(2, 5)]
    asked, change = set[date](), history._lock_and_change

    async def changed(connection: Connection, statement: str, day: date) -> None:
        asked.add(day)
        await change(connection, statement, day)

    monkeypatch.setattr(history, "_lock_and_change", changed)
    await at_times(rows, (datetime(days[1].year, days[1].month, days[1].day, tzinfo=UTC),))
    await history.keep_event_days(rows.connection, days_ahead=5, days_kept=8)
    partitions = await history._partitions(rows.connection)
    assert [f"event_{day:%Y%m%d}" in partitions for day in days] == [True, False, True]
    assert [day in asked for day in days] == [True, False, True]


async def test_a_sweeper_that_died_midway_leaves_no_event_twice_and_none_out(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_JOBS_AT_ONCE", 3)
    name = await make_day(rows)
    await age(rows, *await submitted(rows, 10))
    day = day_of(OLD)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    await rows.connection.fetchval(history.KEEP, start, start + timedelta(1), UUID(int=0), 3)
    assert await rows.connection.fetchval(f"SELECT count(*) FROM {name}") == 7
    assert await rows.connection.fetchval("SELECT count(*) FROM history") == 10
    await sweep(rows)
    assert await rows.connection.fetchval("SELECT count(*) FROM history") == 10
    assert await rows.connection.fetchval("SELECT count(*) FROM event") == 0


async def test_a_job_that_is_forgotten_at_that_moment_leaves_nothing_behind(rows: Rows, another: Open) -> None:
    await make_day(rows)
    job_id = await ended(rows)
    await age(rows, job_id)
    other = (await another()).connection
    async with other.transaction():
        day = day_of(OLD)
        start = datetime(day.year, day.month, day.day, tzinfo=UTC)
        await other.fetchval(history.KEEP, start, start + timedelta(1), UUID(int=0), 100)
        await rows.connection.execute("SET lock_timeout = '50ms'")
        with pytest.raises(asyncpg.LockNotAvailableError):
            await sweeps.forget_jobs(rows.connection, [job_id])
        await rows.connection.execute("RESET lock_timeout")
    await sweeps.forget_jobs(rows.connection, [job_id])
    assert await rows.connection.fetchval("SELECT count(*) FROM history") == 0


async def test_while_somebody_reads_all_events_no_new_event_waits_for_a_day_to_be_made_or_dropped(
    rows: Rows, another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump reads the table for hours. The lock of a day waited for it until the statement's time was over, once a
    minute, and everybody's events behind it.
    """
    old, today = await make_day(rows), f"event_{TODAY:%Y%m%d}"
    changes, change = list[str](), history._lock_and_change
    monkeypatch.setattr(history, "_LOCK_TIMEOUT", "50ms")

    async def changed(connection: Connection, statement: str, day: date) -> None:
        changes.append(statement)
        await change(connection, statement, day)

    monkeypatch.setattr(history, "_lock_and_change", changed)
    dump = (await another()).connection
    async with dump.transaction():
        await dump.fetchval("SELECT count(*) FROM event")
        await history.keep_event_days(rows.connection, days_ahead=3, days_kept=8)
        assert len(changes) == 1, "each further one would have kept the events waiting as long"
        assert await history._partitions(rows.connection) == {old, "event_default"}
    assert await rows.connection.fetchval("SHOW lock_timeout") == "0"
    await sweep(rows)
    assert old not in await history._partitions(rows.connection)
    assert today in await history._partitions(rows.connection) or datetime.now(UTC).date() > TODAY


async def test_a_worker_that_stands_still_between_two_statements_locks_no_events(
    rows: Rows, another: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept the lock of a day that it made, and no job could be submitted until PostgreSQL had ended its session."""
    other, locked = await another(), list[int]()
    execute: Any = type(rows.connection).execute

    async def executed(connection: Connection, statement: str, *arguments: Any) -> str:
        status: str = await execute(connection, statement, *arguments)
        if connection is rows.connection:
            locked.append(await other.connection.fetchval(_EXCLUSIVE_LOCKS))
        return status

    await make_day(rows)
    monkeypatch.setattr(type(rows.connection), "execute", executed)
    await sweep(rows)
    assert (len(locked) > 1, set(locked)) == (True, {0})


async def test_a_day_that_cannot_be_dropped_now_keeps_no_events_without_a_day(rows: Rows, another: Open) -> None:
    """Those that lie in the default partition are deleted all the same."""
    old = await make_day(rows)
    await make_day(rows, 0)
    job_id = await ended(rows)
    await age(rows, job_id, days=OLD + 1)
    await sweeps.forget_jobs(rows.connection, [job_id])
    assert await rows.connection.fetchval("SELECT count(*) FROM event_default") > 0
    dump = (await another()).connection
    async with dump.transaction():
        await dump.fetchval(f"SELECT count(*) FROM {old}")
        await sweep(rows)
    assert await rows.connection.fetchval("SELECT count(*) FROM event_default") == 0
    assert old in await history._partitions(rows.connection)


async def test_events_without_a_day_are_deleted_a_few_jobs_at_a_time(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are millions where no worker ran for a week. One statement did not end within its time, and was begun anew
    each minute.
    """
    monkeypatch.setattr(history, "_JOBS_AT_ONCE", 3)
    kept, *gone = await submitted(rows, 10)
    await age(rows, kept, *gone)
    young = await submitted(rows, 1)
    await rows.connection.execute("DELETE FROM job WHERE id = ANY($1::uuid[])", gone)
    await rows.connection.execute(
        "CREATE FUNCTION few() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF (SELECT count(*) FROM deleted) > 3 THEN"
        " RAISE 'too many at once'; END IF; RETURN NULL; END $$"
    )
    await rows.connection.execute(
        "CREATE TRIGGER few AFTER DELETE ON event_default REFERENCING OLD TABLE AS deleted"
        " FOR EACH STATEMENT EXECUTE FUNCTION few()"
    )
    await sweep(rows)
    found = await rows.connection.fetch("SELECT job_id FROM event")
    assert [row["job_id"] for row in found] == young
    assert [row["job_id"] for row in await rows.connection.fetch("SELECT job_id FROM kept_event")] == [kept]


async def test_an_old_event_of_an_existing_job_that_comes_after_the_others_have_moved_is_kept(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events without a day are deleted next."""
    (job_id,) = await submitted(rows, 1)
    move = history._move_events

    async def move_before_it_comes(connection: Connection, start: datetime, end: datetime) -> None:
        await move(connection, start, end)
        await age(rows, job_id)

    monkeypatch.setattr(history, "_move_events", move_before_it_comes)
    await sweep(rows)
    seen = await told(rows, job_id)
    assert [event["kind"] for event in seen] == ["submitted"]
    monkeypatch.setattr(history, "_move_events", move)
    await sweep(rows)
    assert await told(rows, job_id) == seen
    assert await rows.connection.fetchval("SELECT count(*) FROM event") == 0


@pytest.mark.parametrize("has_day", [True, False])
async def test_an_event_of_weeks_ago_that_is_written_while_old_events_are_deleted_is_kept(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, has_day: bool
) -> None:
    """The claim of a job with a single step is written when its lease ends, with the time of the claim. Also where its
    day is dropped right after.
    """
    if has_day:
        await make_day(rows)
    claimed = await rows.leased()
    await rows.connection.execute("UPDATE task SET started_at = started_at - interval '20 days'")
    move = history._move_events

    async def move_and_end_lease(connection: Connection, start: datetime, end: datetime) -> None:
        await move(connection, start, end)
        fail = Failure(claimed.lease, "error", "no_luck", "bad weather", retryable=True, delay=0)
        await settlements.fail(rows.connection, [fail])

    monkeypatch.setattr(history, "_move_events", move_and_end_lease)
    await sweep(rows)
    kinds = [event["kind"] for event in await told(rows, claimed.job_id)]
    assert kinds[:2] == ["submitted", "claimed"]
    monkeypatch.setattr(history, "_move_events", move)
    await sweep(rows)
    assert [event["kind"] for event in await told(rows, claimed.job_id)] == kinds
    assert await rows.connection.fetchval("SELECT count(*) FROM event_default") == 0


async def test_a_replay_still_knows_which_steps_the_parameters_skipped(rows: Rows) -> None:
    """It asks what was ever told of them."""
    claimed = await rows.leased(THREE)
    fail = Failure(claimed.lease, "error", "no_luck", "bad weather", retryable=False, delay=0)
    await settlements.fail(rows.connection, [fail])
    states = await rows.statuses(claimed.job_id)
    assert list(states.values()) == ["failed", "skipped", "skipped"]
    await age(rows, claimed.job_id)
    await sweep(rows)
    await jobs.replay(rows.connection, claimed.job_id, "t")
    assert list((await rows.statuses(claimed.job_id)).values()) == ["pending", "blocked", "blocked"]


async def test_a_day_costs_what_it_has_itself_however_many_jobs_are_kept(rows: Rows) -> None:
    await make_day(rows)
    for _ in range(4):
        await rows.submit(THREE, count=500)
    await age(rows, *await submitted(rows, 1))
    await rows.connection.execute("ANALYZE job, event")
    day = day_of(OLD)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC)
    said = await rows.connection.fetch(
        "EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF, SUMMARY OFF) " + history.KEEP,
        start, start + timedelta(1), UUID(int=0), 500,
    )  # fmt: skip
    plan = "\n".join(row[0] for row in said)
    assert "Index Scan using job_pkey on job" in plan, plan
    assert not re.search(r"Seq Scan on job|event_default", plan), plan
    assert await rows.connection.fetchval("SELECT count(*) FROM kept_event") == 1


async def test_readers_find_a_kept_event_by_its_key(rows: Rows) -> None:
    """Neither list of the newest events nor a stream reads what is kept of others."""
    for number in range(3):
        await make_day(rows, OLD + number)
    claimed = await rows.leased(THREE)
    await age(rows, claimed.job_id)
    await sweep(rows)
    await rows.connection.execute(
        "INSERT INTO job SELECT (jsonb_populate_record(j, jsonb_build_object('id', gen_random_uuid()))).* FROM job j,"
        " generate_series(1, 2000)"
    )
    await rows.connection.execute(
        "INSERT INTO kept_event SELECT j.id, 1, clock_timestamp(), 't', 'submitted', 'pending' FROM job j"
        " ON CONFLICT DO NOTHING"
    )
    await rows.connection.execute("ANALYZE kept_event")
    for query in (
        "SELECT at FROM history WHERE job_id = $1 ORDER BY seq DESC LIMIT 1",
        "SELECT * FROM history WHERE job_id = $1 AND tenant_id = 't' AND seq > 0 ORDER BY seq LIMIT 100",
    ):
        plan = "\n".join(row[0] for row in await rows.connection.fetch("EXPLAIN " + query, claimed.job_id))
        assert "kept_event_pkey" in plan, plan
        assert "Seq Scan on kept_event" not in plan, plan
