"""Admits jobs that wait at concurrency limits, as many as the limits have room for. `admit` does this at given limits.
`admit_each` is for the sweeper: it calls `admit`, and quarantines the limits at which `admit` fails.

The tables call a limit a gate: `gate_job` has a row for each job at a limit, waiting or admitted. A job is `held` while
it waits for one of its limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any
from uuid import UUID

import structlog

from leasehold.broker.outbox import RELAY_AT, Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.concurrency_limit import EVERYBODY
from leasehold.runtime.duty_cycle import Pauses
from leasehold.runtime.transient import TIMED_OUT
from leasehold.transitions.concurrency.names import JOBS, LIMITS, ConcurrencyLimitName, limit_columns
from leasehold.transitions.concurrency.room import rooms_of
from leasehold.transitions.quarantine import is_away, not_in, run_unit, run_units

log = structlog.get_logger(__name__)

#: `admit` works in batches. A batch reads at most this many waiting jobs.
_MAX_BATCH = 500
#: If the caller of `admit` knows which jobs have ended, the first batch reads two waiting jobs for each ended job, but
#: it reads at least this many waiting jobs. The batch is small, because there is seldom room for more than a few jobs.
_MIN_BATCH = 32
#: A search (`_admit_behind`) passes over the jobs at full limits. The search ends when it has found more full limits
#: than this. More than 2,000 full limits exist only if each value of a payload field has its own limit. Then a search
#: is not needed, because a batch reads the first jobs of each limit, so a full limit hides no job of another limit.
_MAX_FULL = 2000
#: The largest share of its time that a process spends on searches. When the last search is _OLDEST_SEARCH_SECONDS ago,
#: the next search is due in any case.
_SEARCH_SHARE, _OLDEST_SEARCH_SECONDS = 1 / 100, 60.0


def _waiting_sql(name: str, condition: str) -> str:
    """SQL: the jobs that come next at each limit, with all limits of those jobs. `condition`: SQL that a waiting job
    (the row `g` of gate_job) must fulfil, too.

    Tenants take turns: the first job of each tenant comes before the second job of any tenant. So `turn` is the number
    of the job among the waiting jobs of its tenant. At a limit that all tenants share, the number of the tenant's
    admitted jobs is added, so a tenant that already has places comes later. A job at several limits has its highest
    `turn`.

    The jobs of one tenant come by priority (`band`), then by the time since which they may start. The index
    `gate_job_line` has this order. So PostgreSQL reads no job whose start lies in the future, however many such jobs
    wait.

    $1 and $2: the limits. $3: how many jobs the statement returns at most. $4: EVERYBODY (the tenant_id of limits that
    all tenants share). $5: the only job that the statement may return; NULL: it may return any job. `owner`: the tenant
    of a job.
    """
    return f"""
-- {name}
WITH RECURSIVE limits AS (
    SELECT * FROM unnest($1::text[], $2::text[]) AS a(tenant_id, key)
), owners(tenant_id, key, owner) AS (
    -- The tenants that wait at each limit, by a loose index scan: one probe for each tenant, however many jobs it has.
    SELECT limits.tenant_id, limits.key, first.owner
    FROM limits CROSS JOIN LATERAL (
        SELECT g.owner FROM gate_job g
        WHERE g.tenant_id = limits.tenant_id AND g.key = limits.key AND g.admitted_at IS NULL
        ORDER BY g.owner LIMIT 1
    ) AS first
    UNION ALL
    SELECT o.tenant_id, o.key, next.owner
    FROM owners o CROSS JOIN LATERAL (
        SELECT g.owner FROM gate_job g
        WHERE g.tenant_id = o.tenant_id AND g.key = o.key AND g.admitted_at IS NULL AND g.owner > o.owner
        ORDER BY g.owner LIMIT 1
    ) AS next
), heads AS MATERIALIZED (
    -- The first jobs of each tenant, with their turn. At a limit that all tenants share, the turn also counts the
    -- tenant's admitted jobs.
    SELECT head.job_id, head.priority, head.ready_at, head.nth + admitted.job_count AS turn
    FROM owners o
    CROSS JOIN LATERAL (
        SELECT count(*) AS job_count FROM gate_job i
        WHERE o.tenant_id = $4 AND i.tenant_id = o.tenant_id AND i.key = o.key AND i.owner = o.owner
          AND i.admitted_at IS NOT NULL
    ) AS admitted
    CROSS JOIN LATERAL (
        SELECT first.*, row_number() OVER (ORDER BY first.priority, first.ready_at, first.job_id) AS nth
        FROM generate_series(0, 2) AS band CROSS JOIN LATERAL (
            SELECT g.job_id, g.priority, g.ready_at FROM gate_job g
            WHERE g.tenant_id = o.tenant_id AND g.key = o.key AND g.owner = o.owner AND g.priority = band
              AND g.admitted_at IS NULL AND g.ready_at <= statement_timestamp()
              AND ($5::uuid IS NULL OR g.job_id = $5) AND {condition}
            ORDER BY g.ready_at, g.job_id LIMIT $3
        ) AS first
        ORDER BY first.priority, first.ready_at, first.job_id LIMIT $3
    ) AS head
), waiting AS MATERIALIZED (
    SELECT job_id, priority, min(ready_at) AS ready_at, max(turn) AS turn FROM heads GROUP BY job_id, priority
    ORDER BY turn, priority, ready_at, job_id LIMIT $3
)
SELECT w.job_id, j.tenant_id, array_agg(g.tenant_id) AS tenants, array_agg(g.key) AS keys
FROM waiting w JOIN gate_job g ON g.job_id = w.job_id JOIN job j ON j.id = w.job_id
GROUP BY w.job_id, w.priority, w.ready_at, w.turn, j.tenant_id ORDER BY w.turn, w.priority, w.ready_at, w.job_id
"""


# `not_in(JOBS, ...)`: the job is not in quarantine.
_WAITING = _waiting_sql("gates_waiting", not_in(JOBS, "g.job_id"))

# Like `_WAITING`, but the statement passes over the jobs that also wait at one of the limits $6 and $7.
_WAITING_BEHIND = _waiting_sql(
    "gates_waiting_behind",
    f"""{not_in(JOBS, "g.job_id")}
          AND NOT EXISTS (SELECT 1 FROM gate_job f WHERE f.job_id = g.job_id AND (f.tenant_id, f.key) IN (
              SELECT * FROM unnest($6::text[], $7::text[])))""",
)

# Returns which of the jobs $1 still wait, and the limits at which each waits now. `_WAITING` has read these jobs before
# the limits were locked. In between, another admission may have admitted some of the jobs, and a debounce may have made
# a job wait at other limits, or start later. A job that has ended is left out, although it may still have its rows in
# gate_job. `unindexed` makes PostgreSQL find the jobs by their ids, and not by a partial index with the condition. A
# scan of such an index for each job is slow, because until the next vacuum the index has many entries of jobs that have
# ended.
_STILL_WAITING = f"""
-- gates_still_waiting
SELECT g.job_id, array_agg(g.tenant_id) AS tenants, array_agg(g.key) AS keys
FROM gate_job g JOIN job j ON j.id = g.job_id
WHERE g.job_id = ANY($1::uuid[]) AND g.ready_at <= clock_timestamp() AND j.held
  AND {unindexed("j.finished_at IS NULL")}
GROUP BY g.job_id
"""

#: SQL: the task `t` of a held job may run once the limits admit the job. `waiting_on` counts the steps for which a task
#: waits. A first step waits for no other step: it needs none, or all that it needs have succeeded. But while the job is
#: held, `waiting_on` of a first step is 1. This 1 represents all limits of the job. The steps that a workflow started
#: (`contained`) do not count, because the workflow's own step can run while they have not succeeded.
FIRST_STEP_OF_HELD_JOB = """t.status = 'blocked' AND t.waiting_on = 1
      AND NOT EXISTS (SELECT 1 FROM task p WHERE p.job_id = t.job_id AND t.id = ANY(p.unblocks)
                        AND p.status <> 'succeeded' AND NOT p.contained)"""

# Admits the jobs $1. `jobs` locks each job and reads its columns once; later CTEs reuse these columns.
ADMIT = f"""
-- gates_admit
WITH jobs AS MATERIALIZED (
    SELECT j.id, j.tenant_id, j.status, j.event_seq, j.trace
    FROM job j WHERE j.id = ANY($1::uuid[]) AND j.held AND {unindexed("j.finished_at IS NULL")}
    ORDER BY j.id FOR UPDATE
), admissions AS (
    UPDATE gate_job g SET admitted_at = clock_timestamp() FROM jobs WHERE g.job_id = jobs.id
), first_steps AS (
    -- The first steps can run now, or wait for their start time. A workflow is a first step, too: it does not need the
    -- steps that it started (`contained`).
    UPDATE task t
    SET waiting_on = t.waiting_on - 1,
        status = CASE WHEN t.available_at > clock_timestamp() THEN 'waiting' ELSE 'pending' END,
        available_at = greatest(t.available_at, clock_timestamp())
    FROM jobs
    WHERE t.job_id = jobs.id AND {FIRST_STEP_OF_HELD_JOB}
    RETURNING t.id, t.job_id, t.queue, t.priority, t.status, jobs.tenant_id, jobs.status AS job_status,
              jobs.event_seq, jobs.trace
), numbered_steps AS MATERIALIZED (
    -- The first steps, numbered within their job, with the job's next status: `waiting_worker` if they are all for
    -- external workers (queues `ext:`), else `queued` if one of them is due for a worker of the platform.
    SELECT f.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth,
           CASE WHEN bool_and(starts_with(queue, 'ext:')) OVER (PARTITION BY job_id)
                THEN 'waiting_worker'
                WHEN job_status = 'pending' AND bool_or(status = 'pending' AND NOT starts_with(queue, 'ext:'))
                    OVER (PARTITION BY job_id) THEN 'queued' ELSE job_status END AS next_job_status
    FROM first_steps f
), advanced_jobs AS (
    UPDATE job j
    SET held = false, event_seq = j.event_seq + 1, status = per_job.next_job_status,
        -- While the job was held, `deadline_at` was the end of `start_within_seconds`. Now it is the end of
        -- `timeout_seconds` (null: no limit). If both are null, the client may have set the deadline: it stays.
        deadline_at = CASE WHEN j.timeout_seconds IS NULL AND j.start_within_seconds IS NULL THEN j.deadline_at
                           ELSE clock_timestamp() + make_interval(secs => j.timeout_seconds) END
    FROM numbered_steps per_job WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
    SELECT job_id, event_seq + 1, tenant_id, 'admitted', next_job_status FROM numbered_steps WHERE nth = 1
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT id, job_id, queue, priority, trace, {RELAY_AT}
FROM numbered_steps
WHERE status = 'pending' AND NOT starts_with(queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


def new_search() -> Pauses:
    """A clock that says when the next search (`_admit_behind`) of one caller of `admit` is due. The longer the searches
    take, the rarer they are.
    """
    return Pauses(share=_SEARCH_SHARE, at_least=0.0, at_most=_OLDEST_SEARCH_SECONDS)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What a batch has chosen. `job_ids`: the jobs whose limits all have room. `has_more`: another batch may find
    further jobs. `with_room`: the limits that have room for further jobs. `full`: the limits that hold other jobs of
    the batch back.
    """

    job_ids: Sequence[UUID] = ()
    has_more: bool = False
    with_room: Sequence[ConcurrencyLimitName] = ()
    full: frozenset[ConcurrencyLimitName] = frozenset()


async def admit(
    connection: Connection,
    names: Iterable[ConcurrencyLimitName],
    ended: Sequence[UUID] | None = None,
    search: Pauses | None = None,
    *,
    skip_locked: bool = False,
) -> list[Announcement]:
    """Admit as many held jobs of these limits as there is room for. Tenants take turns. The jobs of one tenant are
    admitted by priority, then by their start time. A job that another of its limits holds back does not delay the jobs
    after it. Returns the hints (messages that tell workers of due tasks) that the caller must publish.

    `ended`: the jobs that may have ended since the last call for these limits. None: the caller does not know them, so
    PostgreSQL reads all admitted jobs of the limits to find those that have ended.

    `search`: the clock that this caller got from `new_search`. It says whether a search is due. The jobs at the limits
    `names` may also wait at other limits. If full limits hold back a whole batch of _MAX_BATCH jobs, a search admits
    the jobs behind that batch. A search is seldom due, because its statements may read all waiting jobs. None: this
    call does not search; the sweeper does so later.

    `skip_locked`: do not wait for limits that other transactions have locked, and admit no job at these limits.
    """
    limits = sorted(set(names))
    hints: list[Announcement] = []
    size = _MAX_BATCH if ended is None else min(_MAX_BATCH, max(_MIN_BATCH, 2 * len(ended)))
    has_more = bool(limits)
    while has_more:
        batch = _Batch(connection, limits, ended, size, skip_locked=skip_locked)
        # If PostgreSQL cannot admit all chosen jobs together, `run_units` admits each job separately. So a job whose
        # admission fails delays no other job.
        rows = await run_units(connection, JOBS, batch.choose, batch.admit)
        hints += [Announcement.from_row(row) for row in rows]
        # `batch.chosen.has_more`: more jobs may wait behind this batch. `has_more`: a further batch would find them.
        # If none of _MAX_BATCH jobs was chosen, a further batch would read the same jobs again. Then only a search
        # finds the jobs behind the batch.
        has_more = batch.chosen.has_more and (size < _MAX_BATCH or bool(batch.chosen.job_ids))
        if batch.chosen.has_more and not has_more and search is not None and search.due:
            hints += await _admit_behind(connection, batch.chosen, search, skip_locked=skip_locked)
        ended, size = (), min(_MAX_BATCH, 4 * size)  # `ended`: the first batch has deleted the rows of these jobs
    return hints


async def _admit_behind(
    connection: Connection, chosen: _Chosen, search: Pauses, *, skip_locked: bool
) -> list[Announcement]:
    """Search: admit jobs that wait behind a whole batch of jobs that other limits hold back. `chosen`: the choice of
    that batch. Each further batch leaves out every job that waits at a limit that an earlier batch found full. The
    search ends when a batch finds neither a job to admit nor another full limit.
    """
    began = monotonic()
    hints: list[Announcement] = []
    full = set(chosen.full)
    try:
        while chosen.has_more and len(full) <= _MAX_FULL:
            batch = _Batch(connection, chosen.with_room, (), _MAX_BATCH, sorted(full), skip_locked=skip_locked)
            rows = await run_units(connection, JOBS, batch.choose, batch.admit)
            hints += [Announcement.from_row(row) for row in rows]
            chosen = batch.chosen
            if not chosen.job_ids and chosen.full <= full:
                break
            full |= chosen.full
    except TIMED_OUT:  # these limits are not at fault, so none goes to quarantine
        log.warning("the search for jobs that may be admitted took too long", limits=len(chosen.with_room))
    finally:
        search.done(began)
    return hints


@dataclass(slots=True)
class _Batch:
    """One batch of `admit`. It reads at most `size` waiting jobs, and no job that waits at one of the limits `full`.
    `chosen`: the jobs that the batch admits.
    """

    connection: Connection
    limits: Sequence[ConcurrencyLimitName]
    ended: Sequence[UUID] | None
    size: int
    full: Sequence[ConcurrencyLimitName] = ()
    skip_locked: bool = field(default=False, kw_only=True)
    chosen: _Chosen = field(default=_Chosen(), init=False)

    async def choose(self, only: object | None) -> Sequence[UUID]:
        """Choose the jobs to admit. `only`: choose only this job. `run_units` first passes None; after an error it
        passes each chosen job by itself.
        """
        arguments = (*limit_columns(self.limits), self.size, EVERYBODY, only)
        if self.full:
            waiting_jobs = await self.connection.fetch(_WAITING_BEHIND, *arguments, *limit_columns(self.full))
        else:
            waiting_jobs = await self.connection.fetch(_WAITING, *arguments)
        has_all = len(waiting_jobs) < self.size
        choice = await _choose(
            self.connection, self.limits, self.ended, waiting_jobs, has_all=has_all, skip_locked=self.skip_locked
        )
        if only is None:
            self.chosen = choice
        return choice.job_ids

    async def admit(self, job_ids: Sequence[UUID]) -> list[Any]:
        return await self.connection.fetch(ADMIT, list(job_ids))


async def admit_each(
    connection: Connection, names: Iterable[ConcurrencyLimitName], search: Pauses | None = None
) -> list[Announcement]:
    """Call `admit` for all limits. If that fails, call it for each limit separately, and quarantine the limits that
    fail again. Limits that another transaction has locked are left to a later call, so that they do not delay the other
    limits.
    """
    limits = sorted(set(names))
    try:
        return await admit(connection, limits, search=search, skip_locked=True)
    except Exception as error:
        if is_away(connection, error):  # without the database, no limit can be served
            raise
    hints: list[Announcement] = []
    for name in limits:
        admit_alone = partial(admit, connection, [name], skip_locked=True)
        hints += await run_unit(connection, LIMITS, "/".join(name), admit_alone) or ()
    return hints


async def _choose(
    connection: Connection,
    limits: Sequence[ConcurrencyLimitName],
    ended: Sequence[UUID] | None,
    waiting_jobs: Sequence[Any],
    *,
    has_all: bool,
    skip_locked: bool,
) -> _Chosen:
    """Lock all limits of these waiting jobs (`rooms_of` does this, and returns the room of each limit). Then choose, in
    the order of the jobs, each job whose limits all still have room. `has_all`: these are all jobs that wait.
    """
    limits_of_waiting = (name for row in waiting_jobs for name in _limits_of(row))
    rooms = await rooms_of(connection, sorted({*limits, *limits_of_waiting}), ended, skip_locked=skip_locked)
    ids = [row["job_id"] for row in waiting_jobs]
    still_waiting = {row["job_id"]: row for row in await connection.fetch(_STILL_WAITING, ids)} if ids else {}
    job_ids: list[UUID] = []
    full: set[ConcurrencyLimitName] = set()
    for row in waiting_jobs:
        # `now`: the job's row as `_STILL_WAITING` has read it, after the limits were locked.
        now, names = still_waiting.get(row["job_id"]), _limits_of(row)
        if now is None or {*_limits_of(now)} != {*names}:
            continue  # the job no longer waits, or it now waits at limits that are not locked
        refusing = next((name for name in names if not rooms[name].admits(row["tenant_id"])), None)
        if refusing is not None:
            full.add(refusing)
            continue
        job_ids.append(row["job_id"])
        for name in names:
            rooms[name].take(row["tenant_id"])
    # `refused_share` (room.py): the limit has refused a tenant because of the number of the tenant's admitted jobs. All
    # jobs come in the order of `turn`. So the tenants of the later jobs have at least as many admitted jobs, and the
    # limit would refuse them for the same reason. Therefore the limit has no room for further jobs.
    with_room = [name for name in limits if rooms[name].is_open and not rooms[name].refused_share]
    return _Chosen(job_ids, not has_all and bool(with_room), with_room, frozenset(full))


def _limits_of(row: Any) -> list[ConcurrencyLimitName]:
    return list(zip(row["tenants"], row["keys"], strict=True))
