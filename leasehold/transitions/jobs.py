"""Making jobs, and what people do to them: submit, request_cancel, replay."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from leasehold.broker.outbox import TENANT, Announcement
from leasehold.db.database import Connection, unindexed
from leasehold.domain.concurrency_limit import ConcurrencyLimit
from leasehold.domain.errors import Invalid
from leasehold.domain.ids import new_id
from leasehold.domain.pipeline import Pipeline, Step, pinned_queue
from leasehold.domain.states import JobState, TaskState
from leasehold.runtime.pacing import PIECE
from leasehold.transitions import gates
from leasehold.transitions.endings import JobEnded, jobs_ended

#: Queues of external workers: no hints are written for them, and each belongs to a tenant.
EXTERNAL = "ext:"


@dataclass(frozen=True, slots=True)
class RunOf:
    """What makes a job a run: the template that it was made of, for whom, and whose tick or repetition it is."""

    template: str
    version: int
    scope: str
    scope_id: str
    schedule_id: UUID | None = None
    tick: datetime | None = None
    rerun_of: UUID | None = None

    def record(self) -> dict[str, Any]:
        return {
            "template": self.template,
            "version": self.version,
            "scope": self.scope,
            "scope_id": self.scope_id,
            "schedule_id": self.schedule_id,
            "tick": self.tick,
            "rerun_of": self.rerun_of,
        }


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be written. `params` must already be validated by the pipeline's params model."""

    pipeline: Pipeline
    tenant_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    output_prefix: str | None = None  # default: jobs/{id}/output
    priority: int = 1
    step_priority: Mapping[str, int] = field(default_factory=dict)  # of steps that have another than the job
    keep_seconds: int | None = None
    # Without one: the pipeline's `start_within` while it is held, and its timeout from when it is admitted, by the
    # database's clock.
    deadline_at: datetime | None = None
    trace: Mapping[str, str] | None = None
    id: UUID = field(default_factory=new_id)
    not_before: datetime | None = None  # nothing of it starts earlier
    gates: Sequence[ConcurrencyLimit] = ()  # it waits until all of them let it in (leasehold.transitions.gates)
    exclusive_key: str | None = None  # a second unfinished job with it raises asyncpg.UniqueViolationError
    dedupe_key: str | None = None  # as exclusive_key
    start_within: timedelta | None = None  # in place of the pipeline's
    notify: bool = False  # webhooks want to know how it ends
    pin: str | None = None  # only workers with this label do it: LEASEHOLD_WORKER_LABELS
    run: RunOf | None = None


# $1 the jobs, $2 the tasks, as JSON records: one round trip however many. Nothing is joined: the planner takes what a
# CTE returns for one row, and would compare each task of a batch with each job of it.
SUBMIT = """
-- submit
WITH new_job AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset($1::jsonb) AS j(
        id uuid, tenant_id text, pipeline text, pipeline_version smallint, status text, priority smallint,
        steps smallint, keep_seconds int, params jsonb, inputs jsonb, output_prefix text, trace jsonb,
        deadline_at timestamptz, not_before timestamptz, timeout_seconds int, start_within_seconds int,
        external smallint, gated bool,
        notify bool, exclusive_key text, dedupe_key text, cancelable bool, grace_seconds int,
        template text, version smallint, scope text, scope_id text, schedule_id uuid, tick timestamptz, rerun_of uuid)
), new_task AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset($2::jsonb) AS t(
        id uuid, job_id uuid, tenant_id text, step text, position smallint, queue text, priority smallint, status text,
        waiting_on smallint, unblocks uuid[], max_attempts smallint, handler text, timeout_seconds int,
        cancelable bool, not_before timestamptz, trace jsonb)
), jobs AS (
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, priority, steps_left, event_seq, keep_seconds,
                     params, inputs, output_prefix, trace, deadline_at, timeout_seconds, start_within_seconds,
                     external, held, gated, notify, exclusive_key, dedupe_key,
                     cancelable, grace_seconds)
    SELECT id, tenant_id, pipeline, pipeline_version, status, priority, steps, 1, keep_seconds,
           params, inputs, output_prefix, trace,
           coalesce(deadline_at, coalesce(not_before, clock_timestamp())
                    + make_interval(secs => CASE WHEN gated THEN start_within_seconds ELSE timeout_seconds END)),
           timeout_seconds, start_within_seconds,
           external, gated, gated, notify, exclusive_key, dedupe_key, cancelable, grace_seconds
    FROM new_job
), runs AS (
    INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id, scheduled_at, schedule_id, tick, rerun_of)
    SELECT id, tenant_id, template, version, scope, scope_id, not_before, schedule_id, tick, rerun_of
    FROM new_job WHERE template IS NOT NULL
), tasks AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,
                      max_attempts, handler, timeout_seconds, cancelable, available_at, finished_at)
    SELECT id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,
           max_attempts, handler, timeout_seconds, cancelable, coalesce(not_before, clock_timestamp()),
           CASE WHEN status = 'skipped' THEN clock_timestamp() END
    FROM new_task
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
    SELECT id, 1, tenant_id, 'submitted', status FROM new_job
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT id, job_id, queue, priority, trace, clock_timestamp() + interval '1 second'
FROM new_task
WHERE status = 'pending' AND NOT starts_with(queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


def _job_record(new: NewJob, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    terms = new.pipeline.terms
    first = [task for task in tasks if task["status"] in ("pending", "waiting")]
    outside = bool(first) and all(task["queue"].startswith(EXTERNAL) for task in first)
    return {
        "id": new.id,
        "tenant_id": new.tenant_id,
        "pipeline": new.pipeline.name,
        "pipeline_version": new.pipeline.version,
        "status": JobState.WAITING_WORKER if outside else JobState.PENDING,
        "priority": new.priority,
        "steps": sum(task["status"] != "skipped" for task in tasks),
        "keep_seconds": new.keep_seconds,
        "params": new.params,
        "inputs": new.inputs,
        "output_prefix": new.output_prefix or f"jobs/{new.id}/output",
        "trace": _hint_headers(new),
        "deadline_at": new.deadline_at,
        "not_before": new.not_before,
        "timeout_seconds": None if new.deadline_at is not None else _whole(terms.timeout),
        "start_within_seconds": None if new.deadline_at is not None else _whole(new.start_within or terms.start_within),
        "external": sum(step.external for step in new.pipeline.steps),
        "gated": bool(new.gates),
        "notify": new.notify,
        "exclusive_key": new.exclusive_key,
        "dedupe_key": new.dedupe_key,
        "cancelable": terms.cancelable,
        "grace_seconds": int(terms.grace.total_seconds()),
    } | (new.run.record() if new.run is not None else {})


def _whole(seconds: timedelta | None) -> int | None:
    return None if seconds is None else max(round(seconds.total_seconds()), 1)


def _hint_headers(new: NewJob) -> dict[str, str]:
    """Every statement that writes a hint of the job copies them from its row."""
    return {**(new.trace or {}), TENANT: new.tenant_id}


def _task_records(new: NewJob) -> list[dict[str, Any]]:
    steps = [step for step in new.pipeline.steps if not step.part]
    ids = {step.name: new_id() for step in steps}
    skipped = {step.name for step in steps if step.skip_if is not None and step.skip_if.holds(new.params)}
    if len(skipped) == len(steps):
        raise Invalid("nothing_to_do", "The parameters skip every step.")
    return [_task_record(new, step, position, ids, skipped) for position, step in enumerate(steps)]


def _task_record(new: NewJob, step: Step, position: int, ids: Mapping[str, UUID], skipped: set[str]) -> dict[str, Any]:
    waiting_on = sum(need not in skipped for need in step.needs)
    not_before = new.not_before if waiting_on == 0 else None
    if new.gates and waiting_on == 0:
        waiting_on = 1  # the gates count as a step that it needs
    return {
        "id": ids[step.name],
        "job_id": new.id,
        "tenant_id": new.tenant_id,
        "priority": new.step_priority.get(step.name, new.priority),
        "trace": _hint_headers(new),
        "step": step.name,
        "position": position,
        "queue": external_queue(new.tenant_id, step.queue) if step.external else pinned_queue(step.queue, new.pin),
        "status": _first_state(step, waiting_on, not_before, skipped),
        "waiting_on": waiting_on,
        "unblocks": [ids[o.name] for o in new.pipeline.steps if step.name in o.needs and step.name not in skipped],
        "max_attempts": step.max_attempts,
        "handler": step.handler,
        "timeout_seconds": _limit(step),
        "cancelable": step.cancelable,
        "not_before": not_before,
    }


def _limit(step: Step) -> int | None:
    """Seconds of one attempt. The code's own are looked up by who runs it; nobody does for an external worker."""
    if step.timeout_seconds is None and step.external:
        return max(int(step.timeout.total_seconds()), 1)
    return step.timeout_seconds


def _first_state(step: Step, waiting_on: int, not_before: datetime | None, skipped: set[str]) -> TaskState:
    if step.name in skipped:
        return TaskState.SKIPPED
    if waiting_on:
        return TaskState.BLOCKED
    return TaskState.PENDING if not_before is None else TaskState.WAITING


async def submit(connection: Connection, jobs: Sequence[NewJob]) -> list[Announcement]:
    """- -> pending: the job, its run, one task a step, the first event and the hints, in a statement for each `PIECE`
    tasks, all of them or none.

    Publish the returned hints once the transaction has committed. A job id that exists already raises
    asyncpg.UniqueViolationError and writes nothing. Jobs with gates are held: call `gates.admit` after the commit.
    Raises Invalid when the parameters skip every step.
    """
    most = max(1, PIECE // max((len(new.pipeline.steps) for new in jobs), default=1))
    if len(jobs) <= most:
        hints = await _written(connection, *_records(jobs))
    else:
        async with connection.transaction():
            hints = await _written_in_pieces(connection, jobs, most)
    gated = [new for new in jobs if new.gates]
    if gated:
        await gates.queue_up(connection, gated)
    return hints


async def _written_in_pieces(connection: Connection, jobs: Sequence[NewJob], most: int) -> list[Announcement]:
    """`most` jobs at a time. Each piece's records are made while PostgreSQL writes the piece before it. The event loop
    serves others between any two.
    """
    hints: list[Announcement] = []
    writing: asyncio.Task[list[Announcement]] | None = None
    try:
        for first in range(0, len(jobs), most):
            records = _records(jobs[first : first + most])
            if writing is not None:
                hints += await writing
            writing = asyncio.create_task(_written(connection, *records))
            await asyncio.sleep(0)  # it is sent before the next piece is begun
        if writing is not None:
            hints += await writing
    finally:
        if writing is not None:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)  # the connection is free again
    return hints


def _records(jobs: Sequence[NewJob]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of the jobs, and of their tasks."""
    tasks = [_task_records(new) for new in jobs]
    records = [_job_record(new, its) for new, its in zip(jobs, tasks, strict=True)]
    return records, [record for its in tasks for record in its]


async def _written(
    connection: Connection, jobs: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]
) -> list[Announcement]:
    return [Announcement.from_row(row) for row in await connection.fetch(SUBMIT, jobs, tasks)]


def external_queue(tenant_id: str, queue: str) -> str:
    """The row's queue for external workers of a tenant: nobody else's can ask for it."""
    return f"{EXTERNAL}{tenant_id}:{queue}"


# In a transaction of its own two statements: a statement that waited for the job's lock would read steps as they
# were before.
_LOCK = f"""
-- cancel_lock
SELECT j.id FROM job j
WHERE j.id = ANY($1::uuid[]) AND j.tenant_id = $2 AND j.status <> 'cancel_requested' AND (j.cancelable OR $3)
  AND {unindexed("j.finished_at IS NULL")}
ORDER BY j.id
FOR UPDATE
"""

REQUEST_CANCEL = """
-- cancel
WITH stopped AS (
    UPDATE task t
    SET status = CASE WHEN t.status = 'blocked' THEN 'skipped' ELSE 'cancelled' END, finished_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND t.status IN ('blocked', 'pending', 'retry', 'waiting')
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status
), counted AS (
    SELECT j.id, count(s.id)::int AS n FROM job j LEFT JOIN stopped s ON s.job_id = j.id
    WHERE j.id = ANY($1::uuid[]) GROUP BY j.id
), advanced AS (
    UPDATE job j
    SET status = CASE WHEN j.leased = 0 THEN 'cancelled' ELSE 'cancel_requested' END,
        cancel = $2::jsonb || jsonb_build_object('at', clock_timestamp()),
        cancel_by = clock_timestamp() + make_interval(secs => j.grace_seconds), held = false,
        finished_at = CASE WHEN j.leased = 0 THEN clock_timestamp() END,
        expires_at = CASE WHEN j.leased = 0 THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + counted.n + 1
    FROM counted WHERE j.id = counted.id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - counted.n - 1 AS seq, counted.n, j.pipeline,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), asked AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, data)
    SELECT id, seq + 1, tenant_id, 'cancel_requested', CASE WHEN n = 0 THEN status ELSE 'cancel_requested' END,
           $2::jsonb
    FROM advanced
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT s.job_id, a.seq + 1 + s.nth, a.tenant_id, s.status,
           CASE WHEN s.nth < a.n THEN 'cancel_requested' ELSE a.status END, s.id, s.step, s.status, s.epoch
    FROM (
        SELECT stopped.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth FROM stopped
    ) AS s JOIN advanced a ON a.id = s.job_id
)
SELECT id, status, CASE WHEN status = 'cancelled' THEN id END AS ended_job, pipeline, status AS outcome, seconds
FROM advanced
"""


@dataclass(frozen=True, slots=True)
class Cancels:
    """The new states of the jobs that were asked to stop, and those of them that ended at once."""

    states: dict[UUID, JobState]
    ended: list[JobEnded]


async def request_cancel(
    connection: Connection,
    job_ids: Sequence[UUID],
    tenant_id: str,
    *,
    reason: str,
    by: str,
    forced: bool = False,
) -> Cancels:
    """Live -> cancelled where nothing of the job is leased, else -> cancel_requested; no step starts any more.

    A job without a new state had ended, is being cancelled already, is not the tenant's, or cannot be cancelled
    (unless `forced`).
    """
    async with connection.transaction():
        locked = [row["id"] for row in await connection.fetch(_LOCK, list(job_ids), tenant_id, forced)]
        if not locked:
            return Cancels({}, [])
        rows = await connection.fetch(REQUEST_CANCEL, locked, {"reason": reason, "by": by})
    return Cancels({row["id"]: JobState(row["status"]) for row in rows}, jobs_ended(rows))


EXPIRE_EARLY = """
-- expire_early
UPDATE job
SET keep_seconds = 0, expires_at = CASE WHEN finished_at IS NOT NULL THEN clock_timestamp() END
WHERE id = $1 AND tenant_id = $2
RETURNING finished_at IS NOT NULL AS finished, output_prefix
"""


async def expire_early(connection: Connection, job_id: UUID, tenant_id: str) -> str | None:
    """Let retention take the job as soon as it has ended. Returns the prefix of its objects if it has ended already."""
    row = await connection.fetchrow(EXPIRE_EARLY, job_id, tenant_id)
    return row["output_prefix"] if row is not None and row["finished"] else None


# A step that the parameters skip: nothing was ever told of it.
_LEFT_OUT = """(t.status = 'skipped' AND t.epoch = 0
    AND NOT EXISTS (SELECT 1 FROM history e WHERE e.job_id = t.job_id AND e.task_id = t.id))"""

# A failed job only: its failed and skipped or cancelled steps become runnable again, with their counters reset. The job
# has as long as it had from the start, or from its last replay, and webhooks are told of its end again. $4: it waits at
# gates first, which count as one more step that each runnable step needs. $5: whether $6 replaces its exclusive key.
REPLAY = f"""
-- replay
WITH locked AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND j.status = 'failed'
    FOR UPDATE
), revived AS (
    UPDATE task t
    SET status = CASE WHEN t.waiting_on = 0 AND NOT $4 THEN 'pending' ELSE 'blocked' END,
        waiting_on = CASE WHEN t.waiting_on = 0 AND $4 THEN 1 ELSE t.waiting_on END,
        errors = 0, crashes = 0, losses = 0, finished_at = NULL, available_at = clock_timestamp()
    FROM locked
    WHERE t.job_id = locked.id AND t.status IN ('failed', 'skipped', 'cancelled') AND NOT {_LEFT_OUT}
    RETURNING t.id, t.job_id, t.step, t.position, t.queue, t.priority, t.status, t.epoch
), advanced AS (
    UPDATE job j
    SET status = 'pending', error = NULL, finished_at = NULL, expires_at = NULL, leased = 0,
        params = coalesce($3::jsonb, j.params), held = $4, gated = j.gated OR $4,
        exclusive_key = CASE WHEN $5 THEN $6 ELSE j.exclusive_key END,
        deadline_at = clock_timestamp() + CASE
            WHEN j.timeout_seconds IS NOT NULL OR j.start_within_seconds IS NOT NULL
            THEN make_interval(secs => CASE WHEN $4 THEN j.start_within_seconds ELSE j.timeout_seconds END)
            ELSE j.deadline_at - coalesce(
                (SELECT max(e.at) FROM history e WHERE e.job_id = j.id AND e.kind = 'replayed'),
                (SELECT r.scheduled_at FROM run r WHERE r.job_id = j.id),
                j.created_at) END,
        notify = EXISTS (SELECT 1 FROM run r JOIN webhook w ON w.tenant_id = r.tenant_id AND w.enabled
                         WHERE r.job_id = j.id),
        event_seq = j.event_seq + (SELECT count(*)::int FROM revived)
    FROM locked WHERE j.id = locked.id
    RETURNING j.id, j.tenant_id, j.trace, j.event_seq - (SELECT count(*)::int FROM revived) AS seq
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT r.job_id, a.seq + row_number() OVER (ORDER BY r.position), a.tenant_id, 'replayed', 'pending',
           r.id, r.step, r.status, r.epoch
    FROM revived r JOIN advanced a ON a.id = r.job_id
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT r.id, r.job_id, r.queue, r.priority, a.trace, clock_timestamp() + interval '1 second'
FROM revived r JOIN advanced a ON a.id = r.job_id
WHERE r.status = 'pending' AND NOT starts_with(r.queue, 'ext:')
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


# The step, and whatever needs it, directly or not: what succeeded of it counts no more, and is done again.
REWIND = f"""
-- rewind
WITH RECURSIVE again(id) AS (
    SELECT t.id FROM task t WHERE t.job_id = $1 AND t.step = $2 AND NOT {_LEFT_OUT}
    UNION
    SELECT t.id FROM again JOIN task p ON p.id = again.id JOIN task t ON t.id = ANY(p.unblocks)
    WHERE NOT {_LEFT_OUT}
), forgotten_outputs AS (
    DELETE FROM output o USING again WHERE o.task_id = again.id
), forgotten_results AS (
    DELETE FROM result r USING again WHERE r.task_id = again.id
), rewound AS (
    UPDATE task t
    SET status = CASE WHEN t.status = 'succeeded' THEN 'skipped' ELSE t.status END,
        waiting_on = (SELECT count(*) FROM again a JOIN task p ON p.id = a.id WHERE t.id = ANY(p.unblocks))
    FROM again, task AS before
    WHERE t.id = again.id AND before.id = t.id AND t.finished_at IS NOT NULL
    RETURNING before.status AS was
)
UPDATE job j SET steps_left = j.steps_left + (SELECT count(*) FROM rewound WHERE was = 'succeeded')
WHERE j.id = $1
RETURNING (SELECT count(*) FROM rewound)
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job stands among others: the gates that it waits at, and its exclusive key."""

    gates: Sequence[ConcurrencyLimit] = ()
    exclusive_key: str | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A job of old that waits at gates; as gates.Gated."""

    id: UUID
    tenant_id: str
    priority: int
    gates: Sequence[ConcurrencyLimit]
    not_before: datetime | None = None


async def replay(
    connection: Connection,
    job_id: UUID,
    tenant_id: str,
    params: Mapping[str, Any] | None = None,
    from_step: str | None = None,
    place: Place | None = None,
) -> list[Announcement] | None:
    """failed -> pending, from the failed step on; steps that succeeded stay. None: no such failed job.

    `params`: in place of the job's own, already fit for its pipeline. `from_step`: go on from this step instead, and
    do again what needs it. `place`: where the job stands in its second life; without one it waits at no gates, and
    keeps its exclusive key; it always keeps its dedupe key. With gates the job is held: call `gates.admit` after the
    commit.

    Raises Invalid `unknown_step`; asyncpg.UniqueViolationError while another job has its exclusive or dedupe key.
    """
    async with connection.transaction():
        failed = await connection.fetchrow(
            "SELECT priority FROM job WHERE id = $1 AND tenant_id = $2 AND status = 'failed' FOR UPDATE",
            job_id,
            tenant_id,
        )
        if failed is None:
            return None
        if from_step is not None and not await connection.fetchval(REWIND, job_id, from_step):
            raise Invalid("unknown_step", "The run has no such step.")
        at = place or Place()
        if place is not None:
            await gates.leave(connection, job_id, at.gates)
        rows = await connection.fetch(
            REPLAY, job_id, tenant_id, params, bool(at.gates), place is not None, at.exclusive_key
        )
        if at.gates:
            await gates.queue_up(connection, [_Waiting(job_id, tenant_id, failed["priority"], at.gates)])
    return [Announcement.from_row(row) for row in rows]
