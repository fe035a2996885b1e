"""Making jobs, and what people do to them: submit, replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from leasehold.database import Connection
from leasehold.ids import new_id
from leasehold.outbox import Announcement
from leasehold.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be written. `params` must already be validated by the pipeline's params model."""

    pipeline: Pipeline
    tenant_id: str
    params: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    output_prefix: str | None = None  # default: jobs/{id}/output
    priority: int = 1
    keep_seconds: int | None = None
    deadline_at: datetime | None = None
    trace: Mapping[str, str] | None = None
    id: UUID = field(default_factory=new_id)


# $1 the jobs, $2 the tasks, as JSON records: one round trip however many.
SUBMIT = """
WITH written AS (
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, priority, steps_left, event_seq, keep_seconds,
                     params, inputs, output_prefix, trace, deadline_at)
    SELECT id, tenant_id, pipeline, pipeline_version, priority, steps, 1, keep_seconds,
           params, inputs, output_prefix, trace, deadline_at
    FROM jsonb_to_recordset($1::jsonb) AS j(
        id uuid, tenant_id text, pipeline text, pipeline_version smallint, priority smallint, steps smallint,
        keep_seconds int, params jsonb, inputs jsonb, output_prefix text, trace jsonb, deadline_at timestamptz)
    RETURNING id, tenant_id, priority, trace
), tasks AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,
                      max_attempts)
    SELECT t.id, t.job_id, w.tenant_id, t.step, t.position, t.queue, w.priority,
           CASE WHEN t.waiting_on = 0 THEN 'pending' ELSE 'blocked' END, t.waiting_on, t.unblocks, t.max_attempts
    FROM jsonb_to_recordset($2::jsonb) AS t(
        id uuid, job_id uuid, step text, position smallint, queue text, waiting_on smallint, unblocks uuid[],
        max_attempts smallint)
    JOIN written w ON w.id = t.job_id
    RETURNING id, job_id, queue, priority, status
), told AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
    SELECT id, 1, tenant_id, 'submitted', 'pending' FROM written
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT t.id, t.job_id, t.queue, t.priority, w.trace, clock_timestamp() + interval '1 second'
FROM tasks t JOIN written w ON w.id = t.job_id
WHERE t.status = 'pending'
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


def _job_record(new: NewJob) -> dict[str, Any]:
    return {
        "id": new.id,
        "tenant_id": new.tenant_id,
        "pipeline": new.pipeline.name,
        "pipeline_version": new.pipeline.version,
        "priority": new.priority,
        "steps": len(new.pipeline.steps),
        "keep_seconds": new.keep_seconds,
        "params": new.params,
        "inputs": new.inputs,
        "output_prefix": new.output_prefix or f"jobs/{new.id}/output",
        "trace": new.trace,
        "deadline_at": new.deadline_at,
    }


def _task_records(new: NewJob) -> list[dict[str, Any]]:
    steps = new.pipeline.steps
    ids = {step.name: new_id() for step in steps}
    return [
        {
            "id": ids[step.name],
            "job_id": new.id,
            "step": step.name,
            "position": position,
            "queue": step.queue,
            "waiting_on": len(step.needs),
            "unblocks": [ids[other.name] for other in steps if step.name in other.needs],
            "max_attempts": step.max_attempts,
        }
        for position, step in enumerate(steps)
    ]


async def submit(connection: Connection, jobs: Sequence[NewJob]) -> list[Announcement]:
    """- -> pending: the job, one task a step, the first event and the hints, in one statement.

    Publish the returned hints once the transaction has committed. A job id that exists already raises
    asyncpg.UniqueViolationError and writes nothing.
    """
    tasks = [record for new in jobs for record in _task_records(new)]
    rows = await connection.fetch(SUBMIT, [_job_record(new) for new in jobs], tasks)
    return [Announcement.from_row(row) for row in rows]


# A failed job only: its failed and skipped or cancelled steps become runnable again, with their counters reset.
REPLAY = """
WITH locked AS MATERIALIZED (
    SELECT j.id FROM job j
    WHERE j.id = $1 AND j.tenant_id = $2 AND j.status = 'failed'
    FOR UPDATE
), revived AS (
    UPDATE task t
    SET status = CASE WHEN t.waiting_on = 0 THEN 'pending' ELSE 'blocked' END,
        errors = 0, crashes = 0, losses = 0, finished_at = NULL, available_at = clock_timestamp()
    FROM locked
    WHERE t.job_id = locked.id AND t.status IN ('failed', 'skipped', 'cancelled')
    RETURNING t.id, t.job_id, t.step, t.position, t.queue, t.priority, t.status, t.epoch
), advanced AS (
    UPDATE job j
    SET status = 'pending', error = NULL, finished_at = NULL, expires_at = NULL,
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
WHERE r.status = 'pending'
RETURNING id AS outbox_id, task_id, queue, priority, headers
"""


async def replay(connection: Connection, job_id: UUID, tenant_id: str) -> list[Announcement]:
    """failed -> pending, from the failed step on; steps that succeeded stay. Empty: no such failed job."""
    return [Announcement.from_row(row) for row in await connection.fetch(REPLAY, job_id, tenant_id)]
