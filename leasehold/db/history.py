"""Makes and drops the partitions of the table `event`, one for each day. The worker that leads the installation's
housekeeping calls `keep_event_days`.

Before a day is dropped, the events of jobs that still exist move to `kept_event`. Readers use the view `history`, which
has the rows of both tables. A single statement moves an event, so an event is always in exactly one of the two tables.

The view also derives events from rows of `job` and `task` (migration 0044). No table stores these events, and they last
as long as the job. An update of the task's row may remove the values from which the view derives an event. Then a
trigger writes the event, with the time at which it happened. If the event is older than a day, the trigger writes it
into `kept_event` (migration 0047). In the table `event`, this event could be lost. Housekeeping may already have moved
the other events of that day, and would then drop this event with the day.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import asyncpg
import structlog

from leasehold.db.database import Connection

log = structlog.get_logger(__name__)

#: One statement moves or deletes the events of at most this many jobs. A statement that moves events locks the rows of
#: these jobs, because housekeeping must not delete the jobs before the statement ends.
_JOBS_AT_ONCE = 500
#: At most _MOST_DAYS + 1 past days have a partition. The reason: a statement that reads or writes events locks each
#: partition and its index. PostgreSQL has a fixed number of places for locks (docs/operations/index.md, "What is
#: kept").
_MOST_DAYS = 30
#: PostgreSQL locks the whole table `event` while it makes or drops a partition. A long reader, such as a dump, may
#: delay this lock for hours. While a statement waits for the lock, every new event waits behind the statement. So the
#: statement waits only this long, and the next call tries again. A later try is soon enough, because days are made a
#: week ahead.
_LOCK_TIMEOUT = "1s"
#: The partition for events of days that have no partition.
_DEFAULT_PARTITION = "event_default"
#: An id below the ids of all jobs, and an instant before all events.
_LOWEST_ID, _EPOCH_START = UUID(int=0), datetime(1970, 1, 1, tzinfo=UTC)

# Moves a day's events of existing jobs to `kept_event`. $1 and $2: the day's start and end. $3: the last job of the
# previous statement. $4: the most jobs of one statement. `candidate`: the next jobs with events of that day.
# `existing_job`: the candidates that are not deleted. All statements of the platform lock jobs in the order of their
# ids, because two statements could deadlock otherwise. The cost depends on the events of that day, and not on the
# number of jobs. PostgreSQL reads the index of the day's partition, and finds each job by its key.
KEEP = """
-- keep_events
WITH candidate AS MATERIALIZED (
    SELECT e.job_id FROM event e WHERE e.at >= $1 AND e.at < $2 AND e.job_id > $3
    GROUP BY e.job_id ORDER BY e.job_id LIMIT $4
), existing_job AS MATERIALIZED (
    SELECT locked.id FROM candidate
    CROSS JOIN LATERAL (SELECT j.id FROM job j WHERE j.id = candidate.job_id FOR KEY SHARE) AS locked
), moved_event AS (
    DELETE FROM event e
    WHERE e.job_id = ANY(ARRAY(SELECT id FROM existing_job)) AND e.at >= $1 AND e.at < $2
    RETURNING e.*
), inserted AS (
    INSERT INTO kept_event (job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data FROM moved_event
)
SELECT job_id FROM candidate ORDER BY job_id DESC LIMIT 1
"""

# Deletes from the default partition the events of jobs that no longer exist. `candidate`: the next jobs with events in
# this partition. $1: only events before this instant. $2: the last job of the previous statement. $3: the most jobs of
# one statement.
FORGET = f"""
-- forget_events
WITH candidate AS MATERIALIZED (
    SELECT e.job_id FROM {_DEFAULT_PARTITION} e WHERE e.at < $1 AND e.job_id > $2
    GROUP BY e.job_id ORDER BY e.job_id LIMIT $3
), deleted_event AS (
    DELETE FROM {_DEFAULT_PARTITION} e
    WHERE e.job_id = ANY(ARRAY(SELECT job_id FROM candidate)) AND e.at < $1
      AND NOT EXISTS (SELECT 1 FROM job j WHERE j.id = e.job_id)
)
SELECT job_id FROM candidate ORDER BY job_id DESC LIMIT 1
"""


async def keep_event_days(connection: Connection, *, days_ahead: int, days_kept: int) -> bool:
    """Make the partitions of today and of `days_ahead` more days. If the oldest partition's day is older than
    `days_kept` days, or than _MOST_DAYS + 1 days, drop the partition. Before the drop, move the events of jobs that
    still exist to `kept_event`. If another session uses the table `event` for longer than _LOCK_TIMEOUT, this call
    makes and drops no further day, and leaves the rest to a later call. Returns whether a further day must be dropped.

    A day without a partition is no error, because PostgreSQL puts its events into the default partition. SQL functions
    make and drop the partitions with the rights of the role that migrates, because this process's role may not own the
    schema.
    """
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    today = now.astimezone(UTC).date()
    partitions = await _partitions(connection)
    oldest_kept = today - timedelta(days=min(days_kept, _MOST_DAYS + 1))
    old = sorted(name for name in partitions - {_DEFAULT_PARTITION} if name < _partition_name(oldest_kept))
    try:
        for day in (today + timedelta(days=n) for n in range(days_ahead + 1)):
            if _partition_name(day) not in partitions:
                await _add_day(connection, day)
        if old:
            await _drop_day(connection, date.fromisoformat(old.pop(0).removeprefix("event_")))
    except asyncpg.LockNotAvailableError:
        log.info("the table of events is in use: its days are made and dropped later")
        old.clear()  # so this call reports no further day to drop
    await _clear_default_partition(connection, _start_of_day(oldest_kept))
    return bool(old)


async def _partitions(connection: Connection) -> set[str]:
    rows = await connection.fetch(
        "SELECT c.relname AS name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
        " WHERE i.inhparent = 'event'::regclass"
    )
    return {row["name"] for row in rows}


async def _drop_day(connection: Connection, day: date) -> None:
    await _move_events(connection, _start_of_day(day), _start_of_day(day + timedelta(days=1)))
    await _lock_and_change(connection, "drop_event_day", day)


async def _clear_default_partition(connection: Connection, end: datetime) -> None:
    """Remove the events before `end` from the default partition. Move the events of jobs that still exist, and delete
    the others. If an event of an existing job is written during this call, it stays until the next call.
    """
    await _move_events(connection, _EPOCH_START, end)
    await _for_all_jobs(connection, FORGET, end)


async def _move_events(connection: Connection, start: datetime, end: datetime) -> None:
    """Move the events from `start` to `end` whose jobs still exist."""
    await _for_all_jobs(connection, KEEP, start, end)


async def _for_all_jobs(connection: Connection, statement: str, *times: datetime) -> None:
    """Run `statement` (KEEP or FORGET) again and again, until it finds no further job. Each execution of the statement
    is a transaction of its own. So if the process dies, the next call does the rest.
    """
    last_job: UUID | None = _LOWEST_ID
    while last_job is not None:
        last_job = await connection.fetchval(statement, *times, last_job, _JOBS_AT_ONCE)


async def _lock_and_change(connection: Connection, function: str, day: date) -> None:
    """Call an SQL function that locks the table `event`. Raises LockNotAvailableError after _LOCK_TIMEOUT.

    One statement sets the limit, calls the function and commits. (PostgreSQL evaluates the condition of the CASE first,
    so it sets the limit before it calls the function.) In a transaction of several statements, a process that stops
    between two statements would keep the lock. Nobody could then submit a job.
    """
    await connection.execute(
        f"SELECT CASE WHEN set_config('lock_timeout', '{_LOCK_TIMEOUT}', true) <> '' THEN {function}($1) END", day
    )


def _partition_name(day: date) -> str:
    return f"event_{day:%Y%m%d}"


def _start_of_day(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


async def _add_day(connection: Connection, day: date) -> None:
    """Make the day's partition. If the default partition already has events of that day, do nothing. The reason: to
    make the partition, PostgreSQL would read those events under a lock, and every new event would wait for the lock.

    (The default partition gets events of a day if no worker made the day's partition in time.)
    """
    start, end = _start_of_day(day), _start_of_day(day + timedelta(days=1))
    default_has_events = f"SELECT EXISTS (SELECT 1 FROM {_DEFAULT_PARTITION} WHERE at >= $1 AND at < $2)"
    if await connection.fetchval(default_has_events, start, end):
        return
    try:
        await _lock_and_change(connection, "add_event_day", day)
    except asyncpg.CheckViolationError:  # an event of that day arrived between the two statements
        return
