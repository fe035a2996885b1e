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
    SELECT id, job_id, queue, priority, trace, clock_timestamp() + interval '1 second'
    FROM runnable WHERE runnable_count = 1
    RETURNING id
), batch AS (
    -- Several hints share one row: PostgreSQL then writes a tenth of what a row for each hint would cost.
    INSERT INTO outbox_batch (task_ids, relay_at)
    SELECT array_agg(id), clock_timestamp() + interval '1 second' FROM runnable HAVING count(*) > 1
    RETURNING id
)
SELECT (SELECT id FROM single) AS outbox_id, (SELECT id FROM batch) AS batch_id,
       id AS task_id, queue, priority, trace AS headers
FROM runnable
