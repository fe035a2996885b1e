"""The transitions of the sweeper (a duty of the leader, the worker that is elected for maintenance). They end expired
leases, jobs past their deadline, and cancelled jobs that have not stopped in time. They also delete old rows.

A statement that finds its rows by the time at which they are due compares that time with `statement_timestamp()`,
because PostgreSQL can then search an index. With `clock_timestamp()` PostgreSQL would also read all rows that are not
due. A statement that finds its rows in another way compares with `clock_timestamp()`, the later time. Each statement
handles a small batch, leaves out locked rows, and is safe to run in any worker at any time. Only one worker runs the
statements, because that is enough.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from uuid import UUID

import asyncpg

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection, row_count, unindexed
from leasehold.domain.step_names import declared_step
from leasehold.telemetry.dead_letters import count_dead_letter
from leasehold.telemetry.duties import counted
from leasehold.transitions import jobs
from leasehold.transitions.endings import END_CANCELLED_JOBS, END_FAILED_JOBS, JobEnded, ended_jobs
from leasehold.transitions.jobs.deletions import COUNTS_AT_NO_RATE, IS_REPORTED, LEAVES_NO_RUN
from leasehold.transitions.moves import tenant_stays
from leasehold.transitions.quarantine import not_in, run_units
from leasehold.transitions.workers import LEASE_HAS_PASSED, owner_is_dead

#: The names of this module's duties in the table `quarantine`, which lists the units (jobs) that failed and wait for
#: their next try. `not_in` leaves these units out. `counted` also creates the counters of a duty.
LEASES, CANCELS, DEADLINES = counted("leases"), counted("cancels"), counted("deadlines")
RETENTION = counted("retention")
#: The error code of an attempt whose worker was lost. EXPIRE_LEASES has it as a text, because docs/generate/raised.py
#: finds the codes in the texts of statements.
_WORKER_LOST = "worker_lost"

# In this module a first statement locks the jobs, and a second statement changes them. If a single statement did both,
# its snapshot would be older than its locks. The statement would then miss a step that another transaction commits
# between snapshot and lock, and this step would stay open in a job that has ended.
# In the first statement, only the jobs that it locks count against LIMIT. So jobs that other transactions have locked
# keep no other job waiting.
# $1: the dead owners. $2: lock at most this many jobs. $3: lock only this job; NULL: all jobs that are due.
_LOCK_JOBS_OF_LOST_TASKS = f"""
-- expire_leases_lock
SELECT j.id FROM task t JOIN job j ON j.id = t.job_id
WHERE t.status = 'running' AND (({LEASE_HAS_PASSED}) OR t.lease_owner = ANY($1::uuid[]))
  AND ($3::uuid IS NULL OR t.job_id = $3) AND {not_in(LEASES, "t.job_id")} AND j.status <> 'cancel_requested'
LIMIT $2
FOR UPDATE OF j SKIP LOCKED
"""

# $1: the dead owners. $2: a task with this many earlier losses (attempts whose worker was lost) fails. $3: the locked
# jobs. END_FAILED_JOBS adds the CTEs `advanced_jobs` (the jobs) and `woken_hints` (the hints of workflows that the
# failures woke; hints are messages that tell workers of due tasks). Queues `ext:...` get no hints, because external
# workers poll.
EXPIRE_LEASES = (
    f"""
-- expire_leases
WITH lost_task AS MATERIALIZED (
    SELECT t.id, t.job_id, t.losses, t.contained FROM task t
    WHERE t.job_id = ANY($3::uuid[])
      AND t.status = 'running' AND (({LEASE_HAS_PASSED}) OR {owner_is_dead("$1::uuid[]")})
    ORDER BY t.id
    FOR UPDATE OF t SKIP LOCKED
), decisions AS MATERIALIZED (
    -- `lost_too_often`: the task fails. `ends`: its job fails, too, with all tasks of the job in this batch. A step
    -- that a workflow started (`contained`) does not fail its job.
    SELECT l.id, l.losses >= $2 AS lost_too_often,
           bool_or(l.losses >= $2 AND NOT l.contained) OVER (PARTITION BY l.job_id) AS ends
    FROM lost_task l
), attempt_ended AS (
    UPDATE task t
    SET status = CASE WHEN decisions.lost_too_often OR decisions.ends THEN 'failed' ELSE 'pending' END,
        lease_owner = NULL, lease_until = NULL, losses = t.losses + 1, available_at = clock_timestamp(),
        finished_at = CASE WHEN decisions.lost_too_often OR decisions.ends THEN clock_timestamp() END
    FROM decisions WHERE t.id = decisions.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, t.queue, t.priority,
              t.contained, t.unblocks, t.handler, decisions.ends, NOT decisions.lost_too_often AS again,
              'worker_lost' AS code, 'the worker was lost while it ran this step' AS message,
              'loss' AS cause, true AS retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM attempt_ended
)"""
    + END_FAILED_JOBS
    + f"""
, hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT f.id, f.job_id, f.queue, f.priority, j.trace, {RELAY_AT}
    FROM attempt_ended f JOIN job j ON j.id = f.job_id
    WHERE f.status = 'pending' AND NOT starts_with(f.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
SELECT f.id AS task_id, f.status, f.step, f.handler, h.id AS outbox_id, h.queue, h.priority, h.headers,
       f.status = 'failed' AND NOT f.contained AS is_dead_letter,
       CASE WHEN e.status = 'failed' THEN e.id END AS ended_job, e.pipeline, e.outcome, e.seconds
FROM attempt_ended f JOIN advanced_jobs e ON e.id = f.job_id LEFT JOIN hints h ON h.task_id = f.id
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL, NULL, NULL, NULL, NULL
FROM woken_hints h
"""
)


async def expire_leases(
    connection: Connection, dead_owners: Sequence[UUID], max_losses: int, limit: int = 200
) -> tuple[int, list[Announcement], list[JobEnded]]:
    """running -> pending, for tasks whose lease has expired or whose owner is in `dead_owners`. A task that has
    `max_losses` earlier losses becomes failed.

    Returns how many leases ended, the hints of the tasks that may run again, and the jobs that failed.
    """

    # `run_units` calls `take(None)`, and then `end` with the locked jobs. If `end` fails, `run_units` calls `take` and
    # `end` again for each of these jobs separately.
    async def take(only_job: object | None) -> list[UUID]:
        rows = await connection.fetch(_LOCK_JOBS_OF_LOST_TASKS, list(dead_owners), limit, only_job)
        return sorted({row["id"] for row in rows})  # a job may have lost several tasks

    async def end(locked: Sequence[UUID]) -> list[asyncpg.Record]:
        return await connection.fetch(EXPIRE_LEASES, list(dead_owners), max_losses, list(locked))

    rows = await run_units(connection, LEASES, take, end)
    for row in rows:
        if row["is_dead_letter"]:
            count_dead_letter(row["pipeline"], declared_step(row["step"], row["handler"]), _WORKER_LOST)
    hints = [Announcement.from_row(row) for row in rows if row["outbox_id"] is not None]
    # A row without a status has only the hint of a woken workflow, and does not stand for an ended lease.
    return sum(row["status"] is not None for row in rows), hints, ended_jobs(rows)


async def _lock_in_order(
    connection: Connection, statement: str, limit: int, only_job: object | None, *parameters: object
) -> list[UUID]:
    """Lock jobs by a `statement` with an ORDER BY, and return their ids. `only_job`: the id of the one job to lock;
    None: all jobs that are due.

    `enable_sort = off` makes PostgreSQL read the index that has this order. Otherwise the planner could choose the
    index of all unfinished jobs, because its statistics show few unfinished jobs. But that index also has every job
    that has ended since the last vacuum.
    """
    await connection.execute("SET LOCAL enable_sort = off")
    return [row["id"] for row in await connection.fetch(statement, limit, only_job, *parameters)]


# $1 and $2 are `limit` and `only_job` of `_lock_in_order`.
_LOCK_JOBS_PAST_DEADLINE = f"""
-- expire_jobs_lock
SELECT j.id FROM job j
WHERE j.finished_at IS NULL AND j.deadline_at < statement_timestamp()
  AND ($2::uuid IS NULL OR j.id = $2) AND {not_in(DEADLINES, "j.id")}
ORDER BY j.deadline_at LIMIT $1
FOR UPDATE SKIP LOCKED
"""

# $1: the locked jobs. Each step that the statement ends gets an event, and only the last event of a job shows the job's
# new status. The job's error is `not_started_in_time` if the job still waited at its limits (`held`) and had a time
# within which it must start (`start_within_seconds`). Otherwise the error is `deadline_exceeded`.
EXPIRE_JOBS = """
-- expire_jobs
WITH ended_steps AS (
    UPDATE task t
    SET status = CASE WHEN t.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND t.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status
), task_events AS (
    SELECT ended_steps.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth,
           count(*) OVER (PARTITION BY job_id)::int AS event_count
    FROM ended_steps
), advanced_jobs AS (
    UPDATE job j
    SET status = 'expired', finished_at = clock_timestamp(), leased = 0, held = false,
        expires_at = clock_timestamp() + make_interval(secs => j.keep_seconds),
        error = CASE WHEN before.held AND before.start_within_seconds IS NOT NULL
            THEN jsonb_build_object('code', 'not_started_in_time', 'retryable', true,
                                    'message', 'the job waited at its limits for longer than its start_within')
            ELSE jsonb_build_object('code', 'deadline_exceeded', 'message', 'the job ran past its deadline',
                                    'retryable', true) END,
        event_seq = j.event_seq + per_job.event_count
    FROM (SELECT DISTINCT job_id, event_count FROM task_events) AS per_job
    JOIN job AS before ON before.id = per_job.job_id
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.event_seq - per_job.event_count AS seq, j.pipeline, before.status AS old_status,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT e.job_id, a.seq + e.nth, a.tenant_id, e.status,
           CASE WHEN e.nth = e.event_count THEN 'expired' ELSE a.old_status END, e.id, e.step, e.status, e.epoch
    FROM task_events e JOIN advanced_jobs a ON a.id = e.job_id
)
SELECT id AS ended_job, pipeline, 'expired' AS outcome, seconds FROM advanced_jobs
"""


async def expire_jobs(
    connection: Connection,
    limit: int = 100,
    hooks: Sequence[Callable[[Connection, Sequence[UUID]], Awaitable[None]]] = (),
) -> list[JobEnded]:
    """unfinished -> expired, for jobs past `deadline_at`. Their unfinished steps are skipped or cancelled. `hooks`:
    functions of the kinds of work. `expire_jobs` calls each with the ids of the expired jobs, in the transaction that
    ends the jobs.
    """

    async def end(locked: Sequence[UUID]) -> list[asyncpg.Record]:
        rows = await connection.fetch(EXPIRE_JOBS, list(locked))
        for hook in hooks:
            await hook(connection, [row["ended_job"] for row in rows])
        return rows

    take = partial(_lock_in_order, connection, _LOCK_JOBS_PAST_DEADLINE, limit)
    return ended_jobs(await run_units(connection, DEADLINES, take, end))


# Locks only jobs with a step that can be ended now. Otherwise jobs whose steps must not be interrupted could fill every
# batch, and delay all other jobs. $1 and $2 are `limit` and `only_job` of `_lock_in_order`. $3: the dead owners.
# `cancel_by`: the end of the grace (the time that a cancelled job has to stop).
_LOCK_CANCELLED_JOBS = f"""
-- end_cancels_lock
SELECT j.id FROM job j
WHERE j.cancel_by IS NOT NULL AND j.finished_at IS NULL
  AND ($2::uuid IS NULL OR j.id = $2) AND {not_in(CANCELS, "j.id")}
  AND EXISTS (
    SELECT 1 FROM task t
    WHERE t.job_id = j.id
      AND CASE WHEN t.status = 'running' THEN (t.cancelable AND j.cancel_by < clock_timestamp())
                   OR ({LEASE_HAS_PASSED}) OR t.lease_owner = ANY($3::uuid[])
               ELSE t.finished_at IS NULL AND j.cancel_by < clock_timestamp() END)
ORDER BY j.cancel_by LIMIT $1
FOR UPDATE OF j SKIP LOCKED
"""

# $1: the dead owners. $2: the locked jobs. $3: a workflow with this many earlier losses is not run again. Within the
# grace, the statement makes a workflow (`journaled`) due again if its worker is lost, because the workflow's code must
# still see the cancel, or finish undoing its work. The relay publishes the hints immediately (`relay_at` is now),
# because the caller publishes none. `unindexed`: PostgreSQL uses no partial index for the condition.
RETURN_WORKFLOWS = f"""
-- return_workflows
WITH returned_workflows AS (
    UPDATE task t
    SET status = 'pending', lease_owner = NULL, lease_until = NULL, losses = t.losses + 1,
        available_at = clock_timestamp()
    FROM job j
    WHERE t.job_id = ANY($2::uuid[]) AND t.journaled AND t.losses < $3 AND {unindexed("t.status = 'running'")}
      AND (({LEASE_HAS_PASSED}) OR {owner_is_dead("$1::uuid[]")})
      AND j.id = t.job_id AND j.cancel_by >= clock_timestamp()
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority
), advanced_jobs AS (
    UPDATE job j SET event_seq = j.event_seq + per_job.returned_count
    FROM (SELECT job_id, count(*)::int AS returned_count FROM returned_workflows GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.trace, j.event_seq - per_job.returned_count AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.id), a.tenant_id, 'lost',
           'cancel_requested', r.id, r.step, 'pending', r.epoch
    FROM returned_workflows r JOIN advanced_jobs a ON a.id = r.job_id
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT r.id, r.job_id, r.queue, r.priority, a.trace, clock_timestamp()
FROM returned_workflows r JOIN advanced_jobs a ON a.id = r.job_id
"""

# $1: the dead owners. $2: the locked jobs. $3: as in RETURN_WORKFLOWS. The statement ends the steps whose worker is
# lost. Once the grace has passed, it also ends the steps that still run, and a workflow that waits for a worker. (The
# request for the cancel left such a workflow open, so that its code could see the cancel.) There are two exceptions.
# First: a running step that is not cancelable goes on while its worker is alive. Second: within the grace, this
# statement ends no workflow with fewer than $3 losses. If its lease expires just after RETURN_WORKFLOWS has run, the
# next sweep returns the workflow.
END_CANCELS = (
    f"""
-- end_cancels
WITH jobs AS MATERIALIZED (
    SELECT j.id, j.cancel_by < clock_timestamp() AS overdue FROM job j WHERE j.id = ANY($2::uuid[])
), stopped_steps AS (
    UPDATE task t
    SET status = 'cancelled', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    FROM jobs
    WHERE t.job_id = jobs.id AND t.job_id = ANY($2::uuid[])
      AND CASE WHEN t.status = 'running' THEN (jobs.overdue AND t.cancelable)
                   OR ((jobs.overdue OR NOT t.journaled OR t.losses >= $3)
                       AND (({LEASE_HAS_PASSED}) OR {owner_is_dead("$1::uuid[]")}))
               ELSE jobs.overdue AND t.finished_at IS NULL END
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, jsonb_build_object('forced', true,
              'because', CASE WHEN jobs.overdue THEN 'the grace passed' ELSE 'the worker was lost' END) AS data
)"""
    + END_CANCELLED_JOBS
    + """
SELECT id AS ended_job, pipeline, status AS outcome, seconds FROM advanced_jobs WHERE status = 'cancelled'
"""
)


async def end_cancels(
    connection: Connection, dead_owners: Sequence[UUID], max_losses: int, limit: int = 100
) -> list[JobEnded]:
    """cancel_requested -> cancelled, for jobs whose grace has passed or whose workers are lost.

    Exception: within the grace, a workflow whose worker is lost goes on (running -> pending), unless it has
    `max_losses` earlier losses.
    """

    async def end(locked: Sequence[UUID]) -> list[asyncpg.Record]:
        await connection.execute(RETURN_WORKFLOWS, list(dead_owners), list(locked), max_losses)
        return await connection.fetch(END_CANCELS, list(dead_owners), list(locked), max_losses)

    async def take(only_job: object | None) -> list[UUID]:
        return await _lock_in_order(connection, _LOCK_CANCELLED_JOBS, limit, only_job, list(dead_owners))

    return ended_jobs(await run_units(connection, CANCELS, take, end))


#: SQL condition: nothing keeps `job`, which is past `expires_at`. See `forgettable_jobs`.
IS_FORGETTABLE = (
    f"{IS_REPORTED}"
    " AND NOT EXISTS (SELECT 1 FROM journal e JOIN job parent ON parent.id = e.job_id"
    "   WHERE e.child_id = job.id AND e.kind IN ('start', 'result') AND e.state = 'open' AND e.value IS NULL"
    f"     AND {unindexed('parent.finished_at IS NULL')})"
    f" AND {LEAVES_NO_RUN} AND {COUNTS_AT_NO_RATE}"
    f" AND {not_in(RETENTION, 'job.id')} AND {tenant_stays('job.tenant_id')}"
)


@dataclass(frozen=True, slots=True)
class Forgettable:
    """A finished job past its retention (`expires_at`). `prefix`: the keys of its objects begin with this text."""

    job_id: UUID
    tenant_id: str
    prefix: str
    expires_at: datetime


async def forgettable_jobs(
    connection: Connection, *, since: datetime | None = None, limit: int = 100
) -> list[Forgettable]:
    """Finished jobs past `expires_at`, in the order in which they expired. `since`: only jobs that expired at this time
    or later. The caller must delete the objects of the jobs, and then call `forget_jobs`.

    These jobs are left out:

    - jobs in quarantine, and jobs of tenants that move or have moved to another cell (an installation of its own);
    - runs whose result an unfinished workflow awaits, because the workflow's function may run again from its top, and
      then reads the result again;
    - runs that an unfinished workflow has started, and may still await. (A workflow awaits no detached run, and no run
      whose result or failure it has recorded already);
    - a workflow that did not succeed, until a duty has requested the cancel of the runs that it started;
    - a job whose admission still counts at a limit with a rate (`per_minute`), for a minute at most;
    - a job whose webhook deliveries are not written yet, for another day at most, because they are made from the job's
      row;
    - a job that is being retried (its row is locked), because the retry began before the job expired.
    """
    # With `coalesce`, and not with an OR, PostgreSQL uses the index for both ends of the range, also in a prepared
    # statement.
    rows = await connection.fetch(
        "SELECT id, tenant_id, output_prefix, expires_at FROM job WHERE expires_at < statement_timestamp()"
        f" AND expires_at >= coalesce($2::timestamptz, '-infinity') AND {IS_FORGETTABLE} ORDER BY expires_at LIMIT $1"
        " FOR UPDATE SKIP LOCKED",
        limit,
        since,
    )
    return [Forgettable(row["id"], row["tenant_id"], row["output_prefix"], row["expires_at"]) for row in rows]


#: SQL condition for a table with the column `job_id`: the job is among `$1` (a `uuid[]`) and past `expires_at`.
EXPIRED = "job_id IN (SELECT id FROM job WHERE id = ANY($1::uuid[]) AND expires_at < clock_timestamp())"


async def forget_jobs(
    connection: Connection,
    job_ids: Sequence[UUID],
    before: Sequence[Callable[[Connection, Sequence[UUID]], Awaitable[None]]] = (),
) -> None:
    """Delete expired jobs with their tasks, outputs and failures, and write their tombstones. `before`: the hooks of
    the kinds of work, which first delete their own rows in the same transaction (leasehold.kinds.housekeeping).
    """
    async with connection.transaction():
        for hook in before:
            await hook(connection, job_ids)
        await jobs.forget(connection, job_ids)


async def forget_idempotency_keys(connection: Connection, limit: int = 1000) -> bool:
    """Delete idempotency keys whose answers have expired. SKIP LOCKED leaves out a key that a new request reserves at
    this moment. Otherwise PostgreSQL would wait for that request, and then delete the request's answer. Returns True if
    there may be more expired keys.
    """
    status = await connection.execute(
        "DELETE FROM idempotency WHERE (tenant_id, key) IN ("
        "SELECT tenant_id, key FROM idempotency WHERE expires_at < statement_timestamp() ORDER BY expires_at LIMIT $1"
        " FOR UPDATE SKIP LOCKED)",
        limit,
    )
    return row_count(status) >= limit
