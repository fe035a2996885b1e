-- record_calls_of_cancelled
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
      AND jobs.status = 'cancel_requested'
    ORDER BY t.id
    FOR UPDATE OF t
), calls AS MATERIALIZED (
    -- The calls of the workflows in `held`.
    SELECT w.*, held.id AS workflow, t.job_id, t.tenant_id, t.lease_owner AS owner, t.epoch, t.position, t.priority,
           false AS is_claimed
    FROM held JOIN task t ON t.id = held.id
    CROSS JOIN LATERAL jsonb_to_recordset(($4::jsonb[])[held.nth] -> 'of') AS w(
        branch text, number int, kind text, name text, state text, value jsonb, delay float8, child uuid,
        signal bigint, step text, queue text, max_attempts smallint, handler text, timeout_seconds int,
        cancelable bool, argument jsonb)
), entries AS (
    -- A row that has its result never changes again.
    INSERT INTO journal AS e (job_id, branch, number, kind, name, state, value, child_id, due_at, epoch)
    SELECT job_id, branch, number, kind, name, state, value, child,
           statement_timestamp() + make_interval(secs => delay), epoch
    FROM calls
    ON CONFLICT (job_id, branch, number) DO UPDATE
    SET state = excluded.state, value = excluded.value, epoch = excluded.epoch
    WHERE e.state = 'open' AND excluded.state <> 'open'
), known_starts AS (
    -- The rows `start` of the runs whose results the calls record. The workflow no longer needs such a run. If it has
    -- failed, its row only gets a mark: the run may be retried, and must then be cancelled with its workflow.
    UPDATE journal e SET state = CASE w.state WHEN 'done' THEN 'done' ELSE e.state END,
                         value = CASE w.state WHEN 'failed' THEN '{"known": true}'::jsonb ELSE e.value END
    FROM calls w
    CROSS JOIN LATERAL (SELECT x.child_id FROM journal x WHERE x.job_id = w.job_id AND x.branch = w.branch
                        AND x.number = w.number LIMIT 1) AS awaited
    CROSS JOIN LATERAL (SELECT x.job_id, x.branch, x.number FROM journal x
                        WHERE x.child_id = awaited.child_id AND CASE WHEN x.job_id = w.job_id THEN true ELSE false END
                          AND x.kind = 'start' AND x.state = 'open' LIMIT 1) AS started
    WHERE w.kind = 'result' AND w.state IN ('done', 'failed')
      AND e.job_id = started.job_id AND e.branch = started.branch AND e.number = started.number
), consumed_signals AS (
    DELETE FROM signal s USING calls w WHERE s.id = w.signal AND s.job_id = w.job_id
), steps AS (
    -- `contained`: the workflow started the task. So the workflow handles the task's failure, which is no dead letter.
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, unblocks, max_attempts, handler,
                      timeout_seconds, cancelable, contained, status)
    SELECT child, job_id, tenant_id, step, position, queue, priority, ARRAY[workflow], max_attempts, handler,
           timeout_seconds, cancelable, true, 'pending'
    FROM calls WHERE step IS NOT NULL
    ON CONFLICT (job_id, step) DO NOTHING
    RETURNING id, job_id, step, queue, priority, status, lease_owner, epoch, attempt, handler, timeout_seconds
), arguments AS (
    INSERT INTO item (task_id, parent_id, number, value)
    SELECT child, workflow, number, argument FROM calls WHERE step IS NOT NULL
    ON CONFLICT (task_id) DO NOTHING
), reset_counters AS (
    -- The workflow has made progress: earlier errors and losses (attempts whose worker was lost) no longer count.
    -- `journaled`: the workflow has called something.
    UPDATE task t SET losses = 0, errors = 0, journaled = true
    FROM held WHERE t.id = held.id AND (t.losses + t.errors > 0 OR NOT t.journaled)
), advanced_jobs AS (
    UPDATE job j SET steps_left = j.steps_left + per_job.step_count
    FROM (SELECT job_id, count(*)::int AS step_count FROM steps GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.trace
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT s.id, s.job_id, s.queue, s.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM steps s JOIN advanced_jobs a ON a.id = s.job_id
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, held.id IS NOT NULL AS committed,
       coalesce(jobs.status = 'cancel_requested', false) AS cancelling,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN held ON held.id = a.id LEFT JOIN task t ON t.id = a.id LEFT JOIN jobs ON jobs.id = t.job_id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hints h
