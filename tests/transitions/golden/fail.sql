-- fail
WITH lease_batch AS MATERIALIZED (
    -- The leases. `nth` is the lease's position in every parameter array, counted from 1.
    SELECT a.owner, a.id, a.epoch, a.nth FROM unnest($1::uuid[], $2::uuid[], $3::int[])
        WITH ORDINALITY AS a(owner, id, epoch, nth)
), jobs AS MATERIALIZED (
    -- Locks each job row and reads its columns once; later CTEs reuse them (see claims.marking). The job's leases are
    -- arrays: `owners`, `ids`, `epochs`, and `places` (their `nth`). `leased`: how many of the job's tasks have a
    -- lease. `external`: how many of the job's steps are done by external workers. `single_task`: the id of the job's
    -- only task, if the view `history` derives events of this job (db/tables.py). Then no rows are written for these
    -- events.
    SELECT j.id, j.status, j.steps_left, j.leased, j.external, j.tenant_id, j.trace, j.event_seq, j.pipeline,
           j.created_at, j.single_task, leases.owners, leases.ids, leases.epochs, leases.places
    FROM (
        SELECT t.job_id, array_agg(a.owner) AS owners, array_agg(a.id) AS ids, array_agg(a.epoch) AS epochs,
               array_agg(a.nth) AS places
        FROM lease_batch a JOIN task t ON t.id = a.id GROUP BY t.job_id
    ) AS leases JOIN job j ON j.id = leases.job_id
    ORDER BY j.id
    FOR UPDATE OF j
), held AS MATERIALIZED (
    -- The tasks that pass the guard, locked.
    SELECT t.id, a.nth, jobs.status AS job_status, jobs.steps_left, jobs.leased, jobs.external, jobs.tenant_id,
           jobs.trace, jobs.event_seq, jobs.pipeline, jobs.created_at
    FROM jobs
    CROSS JOIN LATERAL unnest(jobs.owners, jobs.ids, jobs.epochs, jobs.places) AS a(owner, id, epoch, nth)
    JOIN task t ON t.id = a.id
    WHERE CASE WHEN t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running' THEN true ELSE false END
      AND jobs.status <> 'cancel_requested'
    ORDER BY t.id
    FOR UPDATE OF t
), decisions AS MATERIALIZED (
    -- `again`: the task may run again. `ends`: the job fails, because one of its tasks in this batch may not run again.
    -- Then no task of the job runs again. A step that a workflow started (`contained`) does not fail its job.
    SELECT failure.*, bool_or(NOT failure.again AND NOT failure.contained) OVER (PARTITION BY failure.job_id) AS ends
    FROM (
        SELECT t.id, t.job_id, t.contained, f.cause, f.code, f.message, f.delay, f.retryable,
               f.retryable AND CASE f.cause WHEN 'crash' THEN t.crashes + 1 < $9
                                            ELSE t.errors + 1 < t.max_attempts END AS again
        FROM held
        JOIN task t ON t.id = held.id
        JOIN unnest($4::text[], $5::text[], $6::text[], $7::bool[], $8::float8[])
            WITH ORDINALITY AS f(cause, code, message, retryable, delay, nth) ON f.nth = held.nth
    ) AS failure
), attempt_ended AS (
    -- Writes only tasks that pass the guard (guard.py). END_FAILED_JOBS reads this CTE, also the column `unblocks` (the
    -- ids of the tasks that need this one). The fragment adds `advanced_jobs` (the jobs of these tasks) and
    -- `woken_hints` (the hints of the workflows that it wakes). A hint is a message that tells workers of a due task.
    UPDATE task t
    SET status = CASE WHEN decisions.again AND NOT decisions.ends THEN 'retry' ELSE 'failed' END,
        lease_owner = NULL, lease_until = NULL,
        errors = t.errors + (decisions.cause <> 'crash')::int,
        crashes = t.crashes + (decisions.cause = 'crash')::int,
        available_at = clock_timestamp() + make_interval(secs => decisions.delay),
        finished_at = CASE WHEN NOT decisions.again OR decisions.ends THEN clock_timestamp() END
    FROM decisions WHERE t.id = decisions.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status, t.available_at, t.contained, t.unblocks,
              decisions.ends, decisions.again, decisions.code, decisions.message, decisions.cause, decisions.retryable
), failures AS (
    INSERT INTO failure (task_id, epoch, cause, code, message, retryable)
    SELECT id, epoch, cause, code, message, retryable FROM attempt_ended
)
, other_steps AS (
    -- The other open steps of the jobs that fail.
    UPDATE task s
    SET status = CASE WHEN s.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE s.job_id IN (SELECT job_id FROM attempt_ended WHERE ends)
      AND s.id NOT IN (SELECT id FROM attempt_ended)
      AND s.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING s.id, s.job_id, s.step, s.position, s.epoch, s.status
), task_events AS (
    -- One event for each task, numbered within the job: `nth` of `event_count`. The ended attempts come first.
    SELECT changed.*, row_number() OVER (PARTITION BY job_id ORDER BY sort_group, position) AS nth,
           count(*) OVER (PARTITION BY job_id) AS event_count
    FROM (
        SELECT 0 AS sort_group, id, job_id, step, position, epoch, status,
               contained AND status = 'failed' AS given_up,
               jsonb_build_object('code', code, 'message', message, 'cause', cause,
                   'retry_at', CASE WHEN status <> 'failed' THEN available_at END) AS data
        FROM attempt_ended
        UNION ALL
        SELECT 1, id, job_id, step, position, epoch, status, false, NULL FROM other_steps
    ) AS changed
), per_job AS (
    SELECT job_id, count(*)::int AS event_count, (count(*) FILTER (WHERE sort_group = 0))::int AS attempts,
           (count(*) FILTER (WHERE given_up))::int AS given_up
    FROM task_events GROUP BY job_id
), job_error AS (
    -- A job that fails gets the error of one ended step. A step that may not run again comes first, then a step that
    -- no workflow started, then the step with the lowest position.
    SELECT DISTINCT ON (job_id) job_id, code, message, step, retryable FROM attempt_ended
    WHERE ends ORDER BY job_id, again, contained, position
), advanced_jobs AS (
    -- `leased`: how many of the job's steps are held by workers. `steps_left`: how many have not ended.
    UPDATE job j
    SET status = CASE WHEN job_error.code IS NULL THEN j.status ELSE 'failed' END,
        error = CASE WHEN job_error.code IS NULL THEN j.error
                     ELSE jsonb_build_object('code', job_error.code, 'message', job_error.message,
                                             'step', job_error.step, 'retryable', job_error.retryable) END,
        finished_at = CASE WHEN job_error.code IS NOT NULL THEN clock_timestamp() END,
        expires_at = CASE WHEN job_error.code IS NOT NULL
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        leased = CASE WHEN job_error.code IS NULL THEN j.leased - per_job.attempts ELSE 0 END,
        steps_left = j.steps_left - per_job.given_up,
        event_seq = j.event_seq + per_job.event_count
    FROM per_job LEFT JOIN job_error ON job_error.job_id = per_job.job_id
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.event_count AS seq, j.pipeline,
              CASE WHEN job_error.retryable THEN 'failed'
                   WHEN NOT job_error.retryable THEN 'rejected' END AS outcome,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    -- A job that fails shows its new status in its last event only.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT e.job_id, a.seq + e.nth, a.tenant_id,
           CASE e.status WHEN 'retry' THEN 'retried' WHEN 'pending' THEN 'lost' ELSE e.status END,
           CASE WHEN a.status = 'failed' AND e.nth < e.event_count THEN 'running' ELSE a.status END,
           e.id, e.step, e.status, e.epoch, e.data
    FROM task_events e JOIN advanced_jobs a ON a.id = e.job_id
), woken_workflows AS (
    -- The workflows whose steps have failed for good. `news` counts the ended steps and the signals of a workflow. If
    -- `news` reaches `wake_at` (settlements/completion.py), the workflow is due now. Then `wake_at` becomes null, and
    -- `woken_hints` writes a hint.
    UPDATE task w
    SET news = w.news + failed.steps, wake_at = CASE WHEN w.news + failed.steps < w.wake_at THEN w.wake_at END,
        available_at = CASE WHEN w.status = 'waiting' AND w.news + failed.steps >= w.wake_at THEN clock_timestamp()
                            ELSE w.available_at END
    FROM (
        SELECT workflow, count(*)::int AS steps
        FROM attempt_ended, unnest(attempt_ended.unblocks) AS workflow
        WHERE contained AND status = 'failed' AND NOT ends GROUP BY workflow
    ) AS failed
    WHERE w.id = failed.workflow AND w.id NOT IN (SELECT id FROM attempt_ended)
      AND CASE WHEN (w.status = 'waiting' AND w.wake_at IS NOT NULL) OR w.status = 'running' THEN true ELSE false END
    RETURNING w.id, w.job_id, w.queue, w.priority, w.status, w.wake_at
), woken_hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT w.id, w.job_id, w.queue, w.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM woken_workflows w JOIN advanced_jobs a ON a.id = w.job_id
    WHERE w.status = 'waiting' AND w.wake_at IS NULL
    RETURNING id, task_id, queue, priority, headers
)
-- `settled` is also true if this statement ran before, and only its answer was lost. Then the failure has the same
-- cause. It differs if, for example, the sweeper has failed the task because its worker was lost.
SELECT a.id AS task_id, f.status AS state,
       coalesce(f.id IS NOT NULL OR (t.epoch = a.epoch AND t.status IN ('retry', 'failed') AND ($4::text[])[a.nth] = (
           SELECT earlier.cause FROM failure earlier WHERE earlier.task_id = a.id AND earlier.epoch = a.epoch
       )), false) AS settled,
       coalesce(f.status, t.status) = 'failed' AND NOT t.contained AS is_dead_letter,
       e.id AS ended_job, e.pipeline, e.outcome, e.seconds,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN attempt_ended f ON f.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced_jobs e ON e.id = f.job_id AND e.status = 'failed'
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM woken_hints h
