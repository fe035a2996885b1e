"""Events by day: their partitions are made ahead and dropped when they are old, and what happened to a job that is kept
for longer is kept with it.

Readers ask the view `history`: the days, and what was moved out of them. An event is in one of the two, whatever
happens, for one statement moves it.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

import asyncpg

from leasehold.db.database import Connection

#: Jobs whose events are moved at once: their rows are locked meanwhile against being forgotten.
_TOGETHER = 500
_FIRST, _BEGINNING = UUID(int=0), datetime(1970, 1, 1, tzinfo=UTC)

# $1 and $2 the day, $3 the last job looked at, $4 how many. Whatever is read is found by its key, from the day's own
# index on: a day costs what it has itself, however many jobs are kept. Jobs are locked in the order of their ids, as
# everywhere.
KEEP = """
-- keep_events
WITH asked AS MATERIALIZED (
    SELECT e.job_id FROM event e WHERE e.at >= $1 AND e.at < $2 AND e.job_id > $3
    GROUP BY e.job_id ORDER BY e.job_id LIMIT $4
), living AS MATERIALIZED (
    SELECT mine.id FROM asked
    CROSS JOIN LATERAL (SELECT j.id FROM job j WHERE j.id = asked.job_id FOR KEY SHARE) AS mine
), moved AS (
    DELETE FROM event e
    WHERE e.job_id = ANY(ARRAY(SELECT id FROM living)) AND e.at >= $1 AND e.at < $2
    RETURNING e.*
), kept AS (
    INSERT INTO kept_event (job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT job_id, seq, at, tenant_id, kind, job_status, task_id, step, task_status, epoch, data FROM moved
)
SELECT job_id FROM asked ORDER BY job_id DESC LIMIT 1
"""


async def keep_event_days(connection: Connection, *, ahead: int, behind: int) -> None:
    """Make the event partitions of today and `ahead` days, and drop those older than `behind` days, once the events of
    jobs that still exist are moved out of them.

    Events that arrive for a day without a partition go to the default partition, so an insert never fails. Functions of
    the role that migrated make and drop the days: ours need not own the schema.
    """
    now: datetime = await connection.fetchval("SELECT clock_timestamp()")
    today = now.astimezone(UTC).date()
    present = {
        row["name"]
        for row in await connection.fetch(
            "SELECT c.relname AS name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid"
            " WHERE i.inhparent = 'event'::regclass"
        )
    }
    for day in (today + timedelta(days=n) for n in range(ahead + 1)):
        if _partition(day) not in present:
            await _add_day(connection, day)
    oldest = today - timedelta(days=behind)
    for name in sorted(present - {"event_default"}):
        if name < _partition(oldest):
            day = date.fromisoformat(name.removeprefix("event_"))
            await _keep(connection, _start(day), _start(day + timedelta(days=1)))
            await connection.execute("SELECT drop_event_day($1)", day)
    await _keep(connection, _BEGINNING, _start(oldest))
    await connection.execute("DELETE FROM event_default WHERE at < $1", _start(oldest))


async def _keep(connection: Connection, start: datetime, end: datetime) -> None:
    """Move the events of that time whose jobs still exist, some jobs a commit; whoever died midway is gone on from."""
    last: UUID | None = _FIRST
    while last is not None:
        last = await connection.fetchval(KEEP, start, end, last, _TOGETHER)


def _partition(day: date) -> str:
    return f"event_{day:%Y%m%d}"


def _start(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


async def _add_day(connection: Connection, day: date) -> None:
    """Not when the default partition has events of that day already (no sweeper ran before it began): they stay there.

    To find that out by trying, every minute, would read all of them under a lock that every new event waits for.
    """
    start, end = _start(day), _start(day + timedelta(days=1))
    of_the_day = "SELECT EXISTS (SELECT 1 FROM event_default WHERE at >= $1 AND at < $2)"
    if await connection.fetchval(of_the_day, start, end):
        return
    try:
        await connection.execute("SELECT add_event_day($1)", day)
    except asyncpg.CheckViolationError:  # one has just come
        return
