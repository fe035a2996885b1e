"""Reads the counts and lists of the console's pages Overview and Limits. Each statement reads a bounded number of rows,
however many jobs there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from leasehold.db.database import Connection
from leasehold.db.job_reads import Row
from leasehold.db.unsettled import SILENT

#: Unfinished jobs are counted up to MAX_UNFINISHED. `unfinished_counts` returns the ids of at most MAX_LATE late jobs.
MAX_UNFINISHED, MAX_LATE = 500, 50

# $1: the tenant. $2: a job that waits longer than this for its start is late. (It waits from its submission or, if it
# was submitted with a later start, from that time.) $3: return at most this many ids of late jobs. A job that only an
# external worker can start (`waiting_worker`) is never late, because such a worker may poll seldom.
_UNFINISHED_COUNTS = f"""
-- overview_live
SELECT count(*)::int AS unfinished, (count(*) FILTER (WHERE counted.started_at IS NOT NULL))::int AS started,
       (count(*) FILTER (WHERE counted.held))::int AS held,
       coalesce((array_agg(counted.id ORDER BY greatest(counted.created_at, r.scheduled_at), counted.id)
                 FILTER (WHERE counted.started_at IS NULL AND counted.status <> 'waiting_worker'
                         AND greatest(counted.created_at, r.scheduled_at) < clock_timestamp() - $2::interval)
                )[1:$3], '{{}}') AS late
FROM (SELECT j.id, j.created_at, j.started_at, j.held, j.status FROM job j
      WHERE j.tenant_id = $1 AND j.finished_at IS NULL ORDER BY j.id LIMIT {MAX_UNFINISHED}) AS counted
LEFT JOIN run r ON r.job_id = counted.id
"""


async def unfinished_counts(connection: Connection, tenant_id: str, long_wait: timedelta) -> Row:
    """Counts the tenant's unfinished jobs, but only the oldest MAX_UNFINISHED. `unfinished`: the number of these jobs.
    `started`: how many of them have started. `held`: how many wait at a concurrency limit. `late`: the ids of at most
    MAX_LATE of them that should have started more than `long_wait` ago, but have not started. The job with the longest
    wait is first.
    """
    row = await connection.fetchrow(_UNFINISHED_COUNTS, tenant_id, long_wait, MAX_LATE)
    assert row is not None
    return row


#: `silent_steps` searches this many of the oldest unfinished jobs with external steps, and counts up to MAX_SILENT
#: silent steps.
_MAX_EXTERNAL, MAX_SILENT = 300, 100

# The constant SILENT is a condition: the task `t` is a silent external step.
SILENT_STEPS = f"""
-- overview_silent_steps
SELECT count(*)::int FROM (
    SELECT 1 FROM (SELECT j.id FROM job j WHERE j.tenant_id = $1 AND j.finished_at IS NULL AND j.external > 0
                   ORDER BY j.id LIMIT {_MAX_EXTERNAL}) AS searched
    JOIN task t ON t.job_id = searched.id
    WHERE {SILENT.format(seconds="$2")} LIMIT {MAX_SILENT}) AS counted
"""


async def silent_steps(connection: Connection, tenant_id: str, seconds: float) -> int:
    """The number of silent external steps in the tenant's oldest unfinished jobs, counted up to MAX_SILENT. A step is
    silent if no worker has worked on it for `seconds`.
    """
    counted: int = await connection.fetchval(SILENT_STEPS, tenant_id, seconds)
    return counted


_WORKERS = """
-- overview_workers
SELECT count(*)::int FROM worker WHERE seen_at > statement_timestamp() - make_interval(secs => $1)
"""


async def worker_count(connection: Connection, silent_seconds: float) -> int:
    """The number of workers whose last heartbeat came within `silent_seconds`. Workers serve all tenants."""
    counted: int = await connection.fetchval(_WORKERS, silent_seconds)
    return counted


_PAUSED_SCHEDULES = """
-- overview_paused_schedules
SELECT s.id, s.template, s.paused_because FROM schedule s
WHERE s.tenant_id = $1 AND s.paused_because IS NOT NULL ORDER BY s.id DESC LIMIT 10
"""


async def paused_schedules(connection: Connection, tenant_id: str) -> Sequence[Row]:
    """At most ten schedules that the platform has paused, the newest first."""
    return await connection.fetch(_PAUSED_SCHEDULES, tenant_id)


_DISABLED_WEBHOOKS = """
-- overview_disabled_webhooks
SELECT w.id, w.url, w.disabled_because FROM webhook w
WHERE w.tenant_id = $1 AND w.disabled_because IS NOT NULL ORDER BY w.id LIMIT 10
"""


async def disabled_webhooks(connection: Connection, tenant_id: str) -> Sequence[Row]:
    """At most ten webhooks that the platform has disabled."""
    return await connection.fetch(_DISABLED_WEBHOOKS, tenant_id)


_QUARANTINED = """
-- overview_quarantined
SELECT q.duty, count(*)::int AS n, max(q.error ->> 'code') AS code
FROM (SELECT * FROM quarantine ORDER BY duty LIMIT 1000) AS q
WHERE q.retry_at > statement_timestamp() GROUP BY q.duty ORDER BY q.duty
"""


async def quarantined(connection: Connection) -> Sequence[Row]:
    """For operators: a row for each duty (a maintenance loop of a worker) with units in quarantine. A unit is one thing
    that a duty works on. A unit that failed is in quarantine until the duty tries it again. `n`: the number of the
    duty's units in quarantine now. `code`: the error code of one of them. Reads at most 1,000 units.
    """
    return await connection.fetch(_QUARANTINED)


_HELD_SNAPSHOT = """
-- overview_held_snapshot
SELECT pid, coalesce(nullif(application_name, ''), 'a client') AS application, now() - xact_start AS age
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
  AND coalesce(backend_xmin, backend_xid) IS NOT NULL AND xact_start < now() - $1::interval
ORDER BY xact_start LIMIT 1
"""


async def held_snapshot(connection: Connection, max_age: timedelta) -> Row | None:
    """The oldest transaction in this database that has a snapshot or has written, if it has been open for more than
    `max_age`: its `pid`, `application` and `age`. As long as this transaction is open, vacuum cannot remove rows that
    died after its snapshot. PostgreSQL shows the transactions of other roles only to members of pg_read_all_stats.
    """
    return await connection.fetchrow(_HELD_SNAPSHOT, max_age)


#: A page shows at most MAX_LIMITS limits. For each limit, the admitted jobs and the waiting jobs are counted up to
#: MAX_AT_LIMIT.
MAX_LIMITS, MAX_AT_LIMIT = 25, 100

# SQL: the bounds of a limit (a row of the table `gate`), how many jobs the limit has admitted (`inside`), and how many
# jobs wait at the limit (`waiting`). A limit of the tenant `*` holds for all tenants together.
_LIMIT_COLUMNS = f"""gate.at_most, gate.per_minute,
    (SELECT count(*) FROM (SELECT 1 FROM gate_job g WHERE g.tenant_id = gate.tenant_id AND g.key = gate.key
        AND g.admitted_at IS NOT NULL LIMIT {MAX_AT_LIMIT}) AS admitted_job)::int AS inside,
    (SELECT count(*) FROM (SELECT 1 FROM gate_job g WHERE g.tenant_id = gate.tenant_id AND g.key = gate.key
        AND g.admitted_at IS NULL LIMIT {MAX_AT_LIMIT}) AS waiting_job)::int AS waiting"""

_LIMITS = f"""
-- overview_limits
SELECT gate.tenant_id, gate.key, {_LIMIT_COLUMNS}
FROM (SELECT * FROM gate WHERE declared AND ($1::text IS NULL OR (tenant_id, key) > ($1, $2::text))
      ORDER BY tenant_id, key LIMIT {MAX_LIMITS + 1}) AS gate ORDER BY gate.tenant_id, gate.key
"""


async def limits(connection: Connection, after: tuple[str, str] | None = None) -> Sequence[Row]:
    """For operators: the limits of the next page that operators declared, of all tenants. If there is a further page,
    one more limit, so at most MAX_LIMITS + 1. `inside`: the number of jobs that the limit has admitted. `waiting`: the
    number of jobs that wait at the limit. Both are counted up to MAX_AT_LIMIT. `after`: tenant and key of the last
    limit of the previous page.
    """
    return await connection.fetch(_LIMITS, *(after or (None, None)))


#: The key of a queue's limit is this prefix, followed by the name of the queue.
_QUEUE_KEY = "queue:"
_LIMITS_OF_QUEUES = f"""
-- overview_limits_of_queues
SELECT substr(gate.key, length('{_QUEUE_KEY}') + 1) AS queue, gate.key, {_LIMIT_COLUMNS}
FROM gate WHERE gate.tenant_id = '*' AND gate.declared AND gate.key = ANY($1::text[])
"""


async def limits_of_queues(connection: Connection, queues: Sequence[str]) -> Sequence[Row]:
    """The declared limits of these queues for all tenants together, with the same counts as `limits` reads."""
    return await connection.fetch(_LIMITS_OF_QUEUES, [_QUEUE_KEY + queue for queue in queues])


def _jobs_at_limit_sql(name: str, null_or_not: str) -> str:
    """SQL: the jobs at a limit. `name`: the statement's name. `null_or_not`: NULL for waiting jobs, NOT NULL for
    admitted jobs. This condition stands in the statement's text, because PostgreSQL uses a partial index only if the
    text has the condition of the index. In `gate_job`, the column `owner` has the job's tenant, and the column
    `tenant_id` has the limit's tenant, or `*`.
    """
    return f"""
-- {name}
SELECT listed.job_id AS id, j.tenant_id, coalesce(r.template, j.pipeline) AS template, j.status, j.created_at,
       listed.admitted_at
FROM (SELECT g.job_id, g.admitted_at FROM gate_job g
      WHERE g.tenant_id = $1 AND g.key = $2 AND g.admitted_at IS {null_or_not}
      ORDER BY g.owner, g.priority, g.ready_at, g.job_id LIMIT $3) AS listed
JOIN job j ON j.id = listed.job_id LEFT JOIN run r ON r.job_id = listed.job_id
"""


_INSIDE = _jobs_at_limit_sql("overview_jobs_inside", "NOT NULL")
_WAITING = _jobs_at_limit_sql("overview_jobs_waiting", "NULL")


async def jobs_at_limit(
    connection: Connection, tenant_id: str, key: str, count: int, *, admitted: bool
) -> Sequence[Row]:
    """For operators: at most `count` jobs at the limit. `admitted`: whether to read the jobs that the limit has
    admitted, or the jobs that wait at it. The jobs are sorted by tenant. The jobs of one tenant are in the order in
    which the limit admits them.
    """
    return await connection.fetch(_INSIDE if admitted else _WAITING, tenant_id, key, count)
