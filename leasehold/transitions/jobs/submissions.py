"""`submit` writes new jobs. The API, the schedulers and the code of apps call it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from leasehold.broker.outbox import RELAY_AT, Announcement, HintBatch
from leasehold.db.database import Connection
from leasehold.runtime.gather import cancel_and_wait
from leasehold.runtime.pacing import PIECE_SIZE
from leasehold.transitions import concurrency
from leasehold.transitions.jobs.records import NewJob, job_record, task_records

# One round trip writes any number of jobs. The statement does not join jobs with tasks. The reason: the planner does
# not know how many rows the CTEs have, and might compare each task of a batch with each job of the batch.
# A `gated` job has concurrency limits. Until the limits admit the job, it is held, and `start_within_seconds` is its
# time limit.
# If `not_before` is NULL or has passed, `greatest` gives the present time. So the job comes after all jobs that are due
# already.
# A queue `ext:...` gets no hints (messages that tell workers of due tasks), because external workers poll.
SUBMIT = f"""
-- submit
WITH new_job AS MATERIALIZED (
    -- $1, the jobs as JSON records.
    SELECT * FROM jsonb_to_recordset($1::jsonb) AS j(
        id uuid, tenant_id text, pipeline text, pipeline_version smallint, status text, priority smallint,
        steps smallint, keep_seconds int, params jsonb, inputs jsonb, output_prefix text, trace jsonb,
        deadline_at timestamptz, not_before timestamptz, timeout_seconds int, start_within_seconds int,
        external smallint, gated bool,
        notify bool, exclusive_key text, dedupe_key text, cancelable bool, grace_seconds int, single_task uuid,
        template text, version smallint, scope text, scope_id text, schedule_id uuid, tick timestamptz, rerun_of uuid,
        tags jsonb, callback_url text)
), new_task AS MATERIALIZED (
    -- $2, the tasks as JSON records.
    SELECT * FROM jsonb_to_recordset($2::jsonb) AS t(
        id uuid, job_id uuid, tenant_id text, step text, position smallint, queue text, priority smallint, status text,
        waiting_on smallint, unblocks uuid[], max_attempts smallint, handler text, timeout_seconds int,
        cancelable bool, not_before timestamptz, trace jsonb)
), jobs AS (
    INSERT INTO job (id, tenant_id, pipeline, pipeline_version, status, priority, steps_left, event_seq, keep_seconds,
                     params, inputs, output_prefix, trace, deadline_at, timeout_seconds, start_within_seconds,
                     external, held, gated, notify, exclusive_key, dedupe_key,
                     cancelable, grace_seconds, single_task)
    SELECT id, tenant_id, pipeline, pipeline_version, status, priority, steps, 1, keep_seconds,
           params, inputs, output_prefix, trace,
           coalesce(deadline_at, greatest(not_before, clock_timestamp())
                    + make_interval(secs => CASE WHEN gated THEN start_within_seconds ELSE timeout_seconds END)),
           timeout_seconds, start_within_seconds,
           external, gated, gated, notify, exclusive_key, dedupe_key, cancelable, grace_seconds, single_task
    FROM new_job
), runs AS (
    -- A job with a template is a run.
    INSERT INTO run (job_id, tenant_id, template, version, scope, scope_id, scheduled_at, schedule_id, tick, rerun_of)
    SELECT id, tenant_id, template, version, scope, scope_id, not_before, schedule_id, tick, rerun_of
    FROM new_job WHERE template IS NOT NULL
), tags AS (
    -- A job without tags adds no row.
    INSERT INTO job_tag (job_id, name, tenant_id, value)
    SELECT j.id, t.key, j.tenant_id, t.value FROM new_job j, jsonb_each_text(j.tags) AS t WHERE j.tags IS NOT NULL
), callbacks AS (
    INSERT INTO job_callback (job_id, tenant_id, url)
    SELECT id, tenant_id, callback_url FROM new_job WHERE callback_url IS NOT NULL
), tasks AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,
                      max_attempts, handler, timeout_seconds, cancelable, available_at, finished_at)
    SELECT id, job_id, tenant_id, step, position, queue, priority, status, waiting_on, unblocks,
           max_attempts, handler, timeout_seconds, cancelable, greatest(not_before, clock_timestamp()),
           CASE WHEN status = 'skipped' THEN clock_timestamp() END
    FROM new_task
), events AS (
    -- For a job with a single task no row is written: the view `history` derives the event.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status)
    SELECT id, 1, tenant_id, 'submitted', status FROM new_job WHERE single_task IS NULL
), runnable AS MATERIALIZED (
    SELECT id, job_id, queue, priority, trace, count(*) OVER () AS runnable_count FROM new_task
    WHERE status = 'pending' AND NOT starts_with(queue, 'ext:')
), single AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT id, job_id, queue, priority, trace, {RELAY_AT}
    FROM runnable WHERE runnable_count = 1
    RETURNING id
), batch AS (
    -- Several hints share one row: PostgreSQL then writes a tenth of what a row for each hint would cost.
    INSERT INTO outbox_batch (task_ids, relay_at)
    SELECT array_agg(id), {RELAY_AT} FROM runnable HAVING count(*) > 1
    RETURNING id
)
SELECT (SELECT id FROM single) AS outbox_id, (SELECT id FROM batch) AS batch_id,
       id AS task_id, queue, priority, trace AS headers
FROM runnable
"""


async def submit(connection: Connection, jobs: Sequence[NewJob]) -> list[Announcement]:
    """Write new jobs (pending, queued or waiting_worker). For each job, `submit` writes the job's row, its run (if it
    has a template), a task for each step, the first event and the hints. All jobs or none are written. Each statement
    writes about `PIECE_SIZE` tasks.

    After the commit, the caller must publish the returned hints, and call `concurrency.admit` for jobs with concurrency
    limits. Until this call, these jobs are held. A job id that exists already raises asyncpg.UniqueViolationError and
    writes nothing. Raises Invalid when the parameters skip every step.
    """
    most_steps = max((len(new.pipeline.steps) for new in jobs), default=1)
    jobs_per_piece = max(1, PIECE_SIZE // most_steps)
    limited_jobs = [new for new in jobs if new.limits]
    in_pieces = len(jobs) > jobs_per_piece
    # A single statement needs no transaction. Limited jobs need several statements, for which the caller's transaction
    # is enough. Pieces always get a transaction, or a savepoint inside the caller's transaction.
    needs_transaction = in_pieces or (limited_jobs and not connection.is_in_transaction())
    async with connection.transaction() if needs_transaction else nullcontext():
        if limited_jobs:
            # Limits are written before the jobs and their keys, as in a retry. The opposite order could deadlock with a
            # retry.
            await concurrency.write_limits(connection, [limit for new in limited_jobs for limit in new.limits])
        write = partial(_write_in_pieces, jobs_per_piece=jobs_per_piece) if in_pieces else _write_at_once
        hints = await write(connection, jobs)
        if limited_jobs:
            await concurrency.queue_up(connection, limited_jobs)
    return hints


async def _write_in_pieces(connection: Connection, jobs: Sequence[NewJob], jobs_per_piece: int) -> list[Announcement]:
    """Write the jobs in pieces of `jobs_per_piece` jobs. While PostgreSQL writes one piece, this function makes the
    records of the next piece. The event loop serves other callers between two pieces.
    """
    hints: list[Announcement] = []
    writing = asyncio.create_task(_write(connection, *_records(jobs[:jobs_per_piece])))
    try:
        for first in range(jobs_per_piece, len(jobs), jobs_per_piece):
            await asyncio.sleep(0)  # lets `writing` send its piece to PostgreSQL before the next piece is made
            records = _records(jobs[first : first + jobs_per_piece])
            hints += await writing
            writing = asyncio.create_task(_write(connection, *records))
        return hints + await writing
    finally:
        await cancel_and_wait(writing)  # after an error: wait until the connection is free again


async def _write_at_once(connection: Connection, jobs: Sequence[NewJob]) -> list[Announcement]:
    return await _write(connection, *_records(jobs))


def _records(jobs: Sequence[NewJob]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of the jobs, and the records of all their tasks."""
    tasks_by_job = [task_records(new) for new in jobs]
    job_records = [job_record(new, tasks) for new, tasks in zip(jobs, tasks_by_job, strict=True)]
    return job_records, [record for tasks in tasks_by_job for record in tasks]


async def _write(
    connection: Connection, jobs: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]]
) -> list[Announcement]:
    rows = await connection.fetch(SUBMIT, jobs, tasks)
    batch = HintBatch.of(rows)
    return [Announcement.from_row(row, batch) for row in rows]
