"""Ending an attempt: complete, fail, wait_until, release, fan_out, acknowledge_cancel. Each takes a batch of leases
and answers one verdict a lease.

The guard of them all is the sentence of this project: `id AND lease_owner AND epoch AND status = 'running'`.
A lease that does not match changes nothing. Repeating a settlement whose answer was lost is safe: a task that
this very epoch already settled answers `settled` again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from enum import StrEnum
from time import monotonic
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import Announcement
from leasehold.db.database import Connection
from leasehold.domain.ids import new_id
from leasehold.domain.lease import Lease
from leasehold.transitions.claims import Claimed, LeaseTerms, claimed_of
from leasehold.transitions.endings import END_CANCELLED_JOBS, END_FAILED_JOBS, JobEnded, jobs_ended


class Verdict(StrEnum):
    SETTLED = "settled"
    LOST = "lost"  # another claim, a cancel or the sweeper took the task: this write changed nothing


@dataclass(frozen=True, slots=True)
class Output:
    """An object in the store that the step made; written before the row that names it."""

    name: str
    key: str
    size: int
    sha256: str
    content_type: str


@dataclass(frozen=True, slots=True)
class Completion:
    lease: Lease
    outputs: Sequence[Output] = ()
    value: Mapping[str, Any] | None = None
    goes_on: bool = False  # whoever completed it has room for the next step of the job, if it is of the same queue


@dataclass(frozen=True, slots=True)
class Failure:
    """`cause`: error | timeout | crash. `delay`: seconds until the next attempt, if there may be one."""

    lease: Lease
    cause: str
    code: str
    message: str
    retryable: bool
    delay: float


@dataclass(frozen=True, slots=True)
class Snoozing:
    lease: Lease
    delay: float  # seconds
    note: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tasks that a step spreads into. `handler`: `pipeline.step` of the code that does it."""

    step: str
    queue: str
    max_attempts: int
    handler: str
    value: Any


@dataclass(frozen=True, slots=True)
class FanningOut:
    """A step that goes on once its `parts` (at least one) have succeeded."""

    lease: Lease
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class Settled:
    """A verdict per task, and the hints that the commit wrote: publish them now, the relay will if you do not."""

    verdicts: dict[UUID, Verdict]
    states: dict[UUID, str] = field(default_factory=dict)  # task id -> the state it was left in
    announcements: list[Announcement] = field(default_factory=list)
    ended: list[JobEnded] = field(default_factory=list)
    nexts: dict[UUID, Claimed] = field(default_factory=dict)  # completed task -> the step that goes on after it


# $1 owners, $2 task ids, $3 epochs; every statement of this module begins so. What is needed of the job is read once,
# with its lock, and taken along (see claims): `asked` is the lease's place in the arrays.
_LEASED = """WITH asked AS MATERIALIZED (
    SELECT a.owner, a.id, a.epoch, a.nth FROM unnest($1::uuid[], $2::uuid[], $3::int[])
        WITH ORDINALITY AS a(owner, id, epoch, nth)
), jobs AS MATERIALIZED (
    SELECT j.id, j.status, j.steps_left, j.leased, j.external, j.tenant_id, j.trace, j.event_seq, j.pipeline,
           j.created_at, mine.owners, mine.ids, mine.epochs, mine.places
    FROM (
        SELECT t.job_id, array_agg(a.owner) AS owners, array_agg(a.id) AS ids, array_agg(a.epoch) AS epochs,
               array_agg(a.nth) AS places
        FROM asked a JOIN task t ON t.id = a.id GROUP BY t.job_id
    ) AS mine JOIN job j ON j.id = mine.job_id
    ORDER BY j.id
    FOR UPDATE OF j
), held AS MATERIALIZED (
    SELECT t.id, a.nth, jobs.status AS job_status, jobs.steps_left, jobs.leased, jobs.external, jobs.tenant_id,
           jobs.trace, jobs.event_seq, jobs.pipeline, jobs.created_at
    FROM jobs
    CROSS JOIN LATERAL unnest(jobs.owners, jobs.ids, jobs.epochs, jobs.places) AS a(owner, id, epoch, nth)
    JOIN task t ON t.id = a.id
    -- A CASE, as `unindexed` has: no index of what runs is to be read for it.
    WHERE CASE WHEN t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running' THEN true ELSE false END
      {condition}
    ORDER BY t.id
    FOR UPDATE OF t
)"""
_OF_ANY_JOB = _LEASED.format(condition="")
# An attempt that ends without success in a job that is being cancelled is not retried: see acknowledge_cancel.
_OF_A_WANTED_JOB = _LEASED.format(condition="AND jobs.status <> 'cancel_requested'")
_OF_A_CANCELLED_JOB = _LEASED.format(condition="AND jobs.status = 'cancel_requested'")

# $4 outputs, $5 values, $6 who goes on, $7 for how long a lease is given.
# Whoever goes on claims a step that this very commit makes runnable, instead of a hint: it saves a way over the broker
# and a commit. Not one that is less urgent: others may wait before it.
# Not one of an external worker's jobs, whose state is another question. What is read of the step may be
# older than the row that is updated, which can only need fewer steps by now: then it gets its hint.
COMPLETE = (
    "-- complete\n"
    + _OF_ANY_JOB
    + """
, done AS (
    UPDATE task t
    SET status = 'succeeded', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.queue, t.priority, t.unblocks, held.nth AS place,
              held.job_status, held.steps_left, held.leased, held.external, held.tenant_id, held.trace,
              held.event_seq, held.pipeline, held.created_at
), counted AS MATERIALIZED (
    SELECT d.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth,
           (count(*) OVER (PARTITION BY job_id))::int AS n,
           ($6::bool[])[d.place] AND d.external = 0 AND d.job_status <> 'cancel_requested' AS goes_on
    FROM done d
), parents AS MATERIALIZED (
    SELECT p.*, x.ready AND row_number() OVER (PARTITION BY p.place, x.ready ORDER BY c.position, c.id) = 1 AS taken
    FROM (
        SELECT child, count(*)::int AS n, (array_agg(d.trace))[1] AS trace, (array_agg(d.tenant_id))[1] AS tenant_id,
               (array_agg(d.event_seq + d.n))[1] AS seq, (array_agg(d.place) FILTER (WHERE d.goes_on))[1] AS place,
               (array_agg(d.queue) FILTER (WHERE d.goes_on))[1] AS queue,
               (array_agg(d.priority) FILTER (WHERE d.goes_on))[1] AS priority
        FROM counted d, unnest(d.unblocks) AS child GROUP BY child
    ) AS p JOIN task c ON c.id = p.child
    CROSS JOIN LATERAL (
        SELECT p.place IS NOT NULL AND c.queue = p.queue AND c.priority <= p.priority
               AND c.status = 'blocked' AND c.waiting_on = p.n
               AND NOT EXISTS (SELECT 1 FROM paused_queue q WHERE q.queue = c.queue) AS ready
    ) AS x
), freed AS (
    -- Counted down on the child's own row: its parents are serialised by the job's lock.
    UPDATE task c
    SET waiting_on = c.waiting_on - p.n,
        status = CASE WHEN c.waiting_on <> p.n THEN c.status WHEN p.taken THEN 'running' ELSE 'pending' END,
        lease_owner = CASE WHEN c.waiting_on = p.n AND p.taken THEN ($1::uuid[])[p.place] END,
        lease_until = CASE WHEN c.waiting_on = p.n AND p.taken THEN clock_timestamp() + $7::interval END,
        epoch = c.epoch + (c.waiting_on = p.n AND p.taken)::int,
        attempt = c.attempt + (c.waiting_on = p.n AND p.taken)::int,
        started_at = CASE WHEN c.waiting_on = p.n AND p.taken THEN clock_timestamp() ELSE c.started_at END,
        available_at = clock_timestamp()
    FROM parents p
    WHERE c.id = p.child AND c.status = 'blocked'
    RETURNING c.id, c.job_id, c.tenant_id, c.step, c.position, c.queue, c.priority, c.status, c.epoch, c.attempt,
              c.errors, c.crashes, c.handler, c.timeout_seconds, p.trace, p.seq, p.place
), taken AS MATERIALIZED (
    SELECT f.*, row_number() OVER (PARTITION BY job_id ORDER BY position, id) AS nth FROM freed f
    WHERE f.status = 'running'
), judged AS MATERIALIZED (
    SELECT c.*,
           CASE WHEN c.steps_left = c.n THEN 'succeeded'
                WHEN c.job_status = 'cancel_requested' AND c.leased = c.n THEN 'cancelled'
                WHEN c.external = 0 OR c.job_status = 'cancel_requested' THEN c.job_status
                WHEN EXISTS (
                    SELECT 1 FROM task o WHERE o.job_id = c.job_id AND starts_with(o.queue, 'ext:')
                      AND o.finished_at IS NULL AND o.id NOT IN (SELECT d.id FROM done d)
                      AND o.waiting_on <= (SELECT count(*) FROM done d WHERE o.id = ANY(d.unblocks)))
                THEN 'waiting_worker' ELSE 'running' END AS becomes
    FROM counted c
), advanced AS (
    UPDATE job j
    SET steps_left = j.steps_left - mine.n,
        leased = j.leased - mine.n + gone_on.n,
        status = mine.becomes,
        finished_at = CASE WHEN mine.becomes IN ('succeeded', 'cancelled') THEN clock_timestamp() END,
        expires_at = CASE WHEN mine.becomes IN ('succeeded', 'cancelled')
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + mine.n + gone_on.n
    FROM judged mine
    CROSS JOIN LATERAL (SELECT count(*)::int AS n FROM taken t WHERE t.job_id = mine.job_id) AS gone_on
    WHERE mine.nth = 1 AND j.id = mine.job_id
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT job_id, event_seq + nth, tenant_id, 'completed',
           CASE WHEN becomes IN ('succeeded', 'cancelled') AND nth < n THEN 'running' ELSE becomes END,
           id, step, 'succeeded', epoch
    FROM judged
), claimed AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT t.job_id, t.seq + t.nth, t.tenant_id, 'claimed', 'running', t.id, t.step, 'running', t.epoch,
           jsonb_build_object('worker', ($1::uuid[])[t.place], 'attempt', t.attempt)
    FROM taken t
), stored AS (
    INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)
    SELECT d.id, o.name, d.job_id, d.tenant_id, d.step, o.key, o.size, o.sha256, o.content_type
    FROM done d CROSS JOIN LATERAL jsonb_to_recordset(($4::jsonb[])[d.place] -> 'of')
        AS o(name text, key text, size bigint, sha256 text, content_type text)
), valued AS (
    INSERT INTO result (task_id, value)
    SELECT d.id, ($5::jsonb[])[d.place] FROM done d WHERE ($5::jsonb[])[d.place] IS NOT NULL
), hinted AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT f.id, f.job_id, f.queue, f.priority, f.trace, clock_timestamp() + interval '1 second'
    FROM freed f
    WHERE f.status = 'pending' AND NOT starts_with(f.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
SELECT d.id AS task_id, true AS settled, 'succeeded' AS state,
       CASE WHEN d.becomes IN ('succeeded', 'cancelled') THEN d.job_id END AS ended_job, d.pipeline,
       d.becomes AS outcome, extract(epoch FROM clock_timestamp() - d.created_at)::float8 AS seconds,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers,
       NULL::jsonb AS next
FROM judged d
UNION ALL
SELECT a.id, coalesce(t.status = 'succeeded' AND t.epoch = a.epoch, false), 'succeeded', NULL, NULL, NULL, NULL, NULL,
       NULL, NULL, NULL, NULL
FROM asked a LEFT JOIN task t ON t.id = a.id WHERE a.id NOT IN (SELECT d.id FROM done d)
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL
FROM hinted h
UNION ALL
SELECT ($2::uuid[])[t.place], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, jsonb_build_object(
    'id', t.id, 'epoch', t.epoch, 'attempt', t.attempt, 'job_id', t.job_id, 'tenant_id', t.tenant_id, 'step', t.step,
    'queue', t.queue, 'priority', t.priority, 'errors', t.errors, 'crashes', t.crashes, 'was', 'blocked', 'waited', 0,
    'handler', t.handler, 'timeout_seconds', t.timeout_seconds, 'pipeline', j.pipeline,
    'pipeline_version', j.pipeline_version, 'params', j.params, 'inputs', j.inputs, 'output_prefix', j.output_prefix,
    'trace', j.trace, 'gated', j.gated, 'grace_seconds', j.grace_seconds)
FROM taken t JOIN job j ON j.id = t.job_id
"""
)

# Before FAIL, which may end the job with all its steps: a statement that waited for the lock itself would not see the
# parts into which a sibling has spread meanwhile.
_LOCK_JOBS = """
-- settle_lock
SELECT FROM job j
WHERE j.id IN (SELECT t.job_id FROM task t WHERE t.id = ANY($1::uuid[]))
ORDER BY j.id
FOR UPDATE
"""

# $4 causes, $5 codes, $6 messages, $7 retryable, $8 delays, $9 crashes that are too many
FAIL = (
    "-- fail\n"
    + _OF_A_WANTED_JOB
    + """
, judged AS MATERIALIZED (
    SELECT t.id, t.job_id, f.cause, f.code, f.message, f.delay, f.retryable,
           bool_and(f.retryable AND CASE f.cause WHEN 'crash' THEN t.crashes + 1 < $9
                                                 ELSE t.errors + 1 < t.max_attempts END)
               OVER (PARTITION BY t.job_id) AS again
    FROM held
    JOIN task t ON t.id = held.id
    JOIN unnest($4::text[], $5::text[], $6::text[], $7::bool[], $8::float8[])
        WITH ORDINALITY AS f(cause, code, message, retryable, delay, nth) ON f.nth = held.nth
), failed AS (
    UPDATE task t
    SET status = CASE WHEN judged.again THEN 'retry' ELSE 'failed' END,
        lease_owner = NULL, lease_until = NULL,
        errors = t.errors + (judged.cause <> 'crash')::int,
        crashes = t.crashes + (judged.cause = 'crash')::int,
        available_at = clock_timestamp() + make_interval(secs => judged.delay),
        finished_at = CASE WHEN NOT judged.again THEN clock_timestamp() END
    FROM judged WHERE t.id = judged.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, judged.code, judged.message,
              judged.cause, judged.retryable
), kept AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM failed
)"""
)

FAIL += (
    END_FAILED_JOBS
    + """
SELECT a.id AS task_id, f.status AS state,
       coalesce(f.id IS NOT NULL OR (t.epoch = a.epoch AND t.status IN ('retry', 'failed')), false) AS settled,
       e.id AS ended_job, e.pipeline, e.outcome, e.seconds
FROM asked a LEFT JOIN failed f ON f.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced e ON e.id = f.job_id AND e.status = 'failed'
"""
)

# $4 delays, $5 notes ('null' leaves the old one)
WAIT_UNTIL = (
    "-- wait_until\n"
    + _OF_A_WANTED_JOB
    + """
, parked AS (
    UPDATE task t
    SET status = 'waiting', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        available_at = clock_timestamp() + make_interval(secs => p.delay)
    FROM held
    JOIN unnest($4::float8[], $5::jsonb[]) WITH ORDINALITY AS p(delay, note, nth) ON p.nth = held.nth
    WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.available_at, p.note
), noted AS (
    INSERT INTO note (task_id, value) SELECT id, note FROM parked WHERE jsonb_typeof(note) = 'object'
    ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
), advanced AS (
    UPDATE job j SET event_seq = j.event_seq + mine.n, leased = j.leased - mine.n
    FROM (SELECT job_id, count(*)::int AS n FROM parked GROUP BY job_id) AS mine
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - mine.n AS seq
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT p.job_id, a.seq + row_number() OVER (PARTITION BY p.job_id ORDER BY p.id), a.tenant_id, 'parked',
           a.status, p.id, p.step, 'waiting', p.epoch, jsonb_build_object('until', p.available_at)
    FROM parked p JOIN advanced a ON a.id = p.job_id
)
SELECT a.id AS task_id, 'waiting' AS state,
       coalesce(p.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'waiting'), false) AS settled
FROM asked a LEFT JOIN parked p ON p.id = a.id LEFT JOIN task t ON t.id = a.id
"""
)

RELEASE = (
    "-- release\n"
    + _OF_A_WANTED_JOB
    + """
, released AS (
    UPDATE task t
    SET status = 'pending', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        available_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority
), advanced AS (
    UPDATE job j SET event_seq = j.event_seq + mine.n, leased = j.leased - mine.n
    FROM (SELECT job_id, count(*)::int AS n FROM released GROUP BY job_id) AS mine
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - mine.n AS seq
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.id), a.tenant_id, 'released',
           a.status, r.id, r.step, 'pending', r.epoch
    FROM released r JOIN advanced a ON a.id = r.job_id
), hinted AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT r.id, r.job_id, r.queue, r.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM released r JOIN advanced a ON a.id = r.job_id
    WHERE NOT starts_with(r.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, coalesce(r.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'pending'), false) AS settled,
       'pending' AS state,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM asked a LEFT JOIN released r ON r.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hinted h
"""
)

# The stopped steps' job ends when none of its steps is leased any more.
ACKNOWLEDGE_CANCEL = (
    "-- acknowledge_cancel\n"
    + _OF_A_CANCELLED_JOB
    + """
, stopped AS (
    UPDATE task t
    SET status = 'cancelled', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, NULL::jsonb AS data
)"""
    + END_CANCELLED_JOBS
    + """
SELECT a.id AS task_id, 'cancelled' AS state,
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'cancelled'), false) AS settled,
       e.id AS ended_job, e.pipeline, e.status AS outcome, e.seconds
FROM asked a LEFT JOIN stopped s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced e ON e.id = s.job_id AND e.status = 'cancelled'
"""
)

# $4 the parts, as JSON records {parent, id, step, number, queue, max_attempts, value}.
FAN_OUT = (
    "-- fan_out\n"
    + _OF_A_WANTED_JOB
    + """
, parts AS MATERIALIZED (
    SELECT p.* FROM jsonb_to_recordset($4::jsonb) AS p(
        parent uuid, id uuid, step text, number int, queue text, max_attempts smallint, handler text, value jsonb)
    JOIN held ON held.id = p.parent
), parent AS (
    UPDATE task t
    SET status = 'blocked', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1, waiting_on = mine.n
    FROM (SELECT parent, count(*)::int AS n FROM parts GROUP BY parent) AS mine
    WHERE t.id = mine.parent
    RETURNING t.id, t.job_id, t.tenant_id, t.step, t.position, t.priority, t.epoch, t.cancelable, mine.n
), made AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, unblocks, max_attempts,
                      handler, cancelable)
    SELECT p.id, parent.job_id, parent.tenant_id, p.step, parent.position, p.queue, parent.priority, 'pending',
           ARRAY[parent.id], p.max_attempts, p.handler, parent.cancelable
    FROM parts p JOIN parent ON parent.id = p.parent
    RETURNING id, job_id, queue, priority
), kept AS (
    INSERT INTO item (task_id, parent_id, number, value) SELECT id, parent, number, value FROM parts
), advanced AS (
    UPDATE job j
    SET leased = j.leased - mine.n, steps_left = j.steps_left + mine.parts, event_seq = j.event_seq + mine.n
    FROM (SELECT job_id, count(*)::int AS n, sum(n)::int AS parts FROM parent GROUP BY job_id) AS mine
    WHERE j.id = mine.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - mine.n AS seq
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT p.job_id, a.seq + row_number() OVER (PARTITION BY p.job_id ORDER BY p.id), a.tenant_id, 'fanned_out',
           a.status, p.id, p.step, 'blocked', p.epoch, jsonb_build_object('parts', p.n)
    FROM parent p JOIN advanced a ON a.id = p.job_id
), hinted AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT m.id, m.job_id, m.queue, m.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM made m JOIN advanced a ON a.id = m.job_id
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, coalesce(p.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'blocked'), false) AS settled,
       'blocked' AS state,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM asked a LEFT JOIN parent p ON p.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hinted h
"""
)

#: An attempt that kills its child this often is poison.
MAX_CRASHES = 2


def _columns(leases: Sequence[Lease]) -> tuple[list[UUID], list[UUID], list[int]]:
    return [x.owner for x in leases], [x.task_id for x in leases], [x.epoch for x in leases]


def _settled(rows: Sequence[Any], *, hints: bool = False, ends: bool = False) -> Settled:
    outcome = Settled({}, ended=jobs_ended(rows) if ends else [])
    for row in rows:
        if hints and row["outbox_id"] is not None:
            outcome.announcements.append(Announcement.from_row(row))
            continue
        outcome.verdicts[row["task_id"]] = Verdict.SETTLED if row["settled"] else Verdict.LOST
        if row["settled"] and row["state"] is not None:
            outcome.states[row["task_id"]] = row["state"]
    return outcome


async def complete(
    connection: Connection, completions: Sequence[Completion], terms: LeaseTerms | None = None
) -> Settled:
    """running -> succeeded. Unblocks the steps that needed it and writes their hints; the last step ends the job.

    With `terms`, each completion that `goes_on` claims one of the steps that it unblocks: blocked -> running.
    """
    asked_at = monotonic()
    # Lists in a list would be an array of two dimensions.
    outputs = [{"of": [asdict(output) for output in done.outputs]} if done.outputs else None for done in completions]
    values = [done.value for done in completions]
    columns = _columns([done.lease for done in completions])
    goes_on = [done.goes_on and terms is not None for done in completions]
    ttl = timedelta(seconds=0.0 if terms is None else terms.ttl)
    rows = await connection.fetch(COMPLETE, *columns, outputs, values, goes_on, ttl)
    outcome = _settled([row for row in rows if row["next"] is None], hints=True, ends=True)
    if terms is not None:
        for row in rows:
            if row["next"] is not None:
                outcome.nexts[row["task_id"]] = claimed_of(_with_ids(row["next"]), terms, asked_at)
    return outcome


def _with_ids(said: dict[str, Any]) -> dict[str, Any]:
    return said | {"id": UUID(said["id"]), "job_id": UUID(said["job_id"])}


async def fail(connection: Connection, failures: Sequence[Failure]) -> Settled:
    """running -> retry while the error may pass and attempts are left, else -> failed, and the job with it."""
    columns = _columns([failure.lease for failure in failures])
    async with connection.transaction():
        await connection.execute(_LOCK_JOBS, columns[1])
        rows = await connection.fetch(
            FAIL,
            *columns,
            [failure.cause for failure in failures],
            [failure.code for failure in failures],
            [failure.message for failure in failures],
            [failure.retryable for failure in failures],
            [failure.delay for failure in failures],
            MAX_CRASHES,
        )
    return _settled(rows, ends=True)


async def wait_until(connection: Connection, parkings: Sequence[Snoozing]) -> Settled:
    """running -> waiting: the lease is given back, the attempt does not count, the note is kept."""
    rows = await connection.fetch(
        WAIT_UNTIL,
        *_columns([parking.lease for parking in parkings]),
        [parking.delay for parking in parkings],
        [parking.note for parking in parkings],
    )
    return _settled(rows)


async def release(connection: Connection, leases: Sequence[Lease]) -> Settled:
    """running -> pending, for a worker that stops: the attempt does not count, and another hint is written."""
    return _settled(await connection.fetch(RELEASE, *_columns(leases)), hints=True)


async def acknowledge_cancel(connection: Connection, leases: Sequence[Lease]) -> Settled:
    """running -> cancelled, in a job that was asked to stop; the job ends with the last of its leased steps.

    A lease of any other job is answered LOST and changes nothing.
    """
    return _settled(await connection.fetch(ACKNOWLEDGE_CANCEL, *_columns(leases)), ends=True)


async def fan_out(connection: Connection, spreadings: Sequence[FanningOut]) -> Settled:
    """running -> blocked on new tasks, one a part; when all have succeeded the step runs again.

    A step that was spread before raises asyncpg.UniqueViolationError: its parts have names of their own.
    """
    parts = [
        {
            "parent": spreading.lease.task_id,
            "id": new_id(),
            "step": f"{part.step}.{number}",
            "number": number,
            "queue": part.queue,
            "max_attempts": part.max_attempts,
            "handler": part.handler,
            "value": part.value,
        }
        for spreading in spreadings
        for number, part in enumerate(spreading.parts)
    ]
    columns = _columns([spreading.lease for spreading in spreadings])
    return _settled(await connection.fetch(FAN_OUT, *columns, parts), hints=True)


def delay_seconds(delay: timedelta) -> float:
    return max(delay.total_seconds(), 0.0)
