-- suspend
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
), calls AS MATERIALIZED (
    -- The calls of the workflows in `held`.
    SELECT w.*, held.id AS workflow, t.job_id, t.tenant_id, t.lease_owner AS owner, t.epoch, t.position, t.priority,
           coalesce(w.child = ($8::uuid[])[held.nth], false) AND held.external = 0
               AND NOT EXISTS (SELECT FROM paused_queue q WHERE q.queue = w.queue) AS is_claimed
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
                      timeout_seconds, cancelable, contained, status, lease_owner, lease_until, epoch, attempt, started_at)
    SELECT child, job_id, tenant_id, step, position, queue, priority, ARRAY[workflow], max_attempts, handler,
           timeout_seconds, cancelable, true, CASE WHEN is_claimed THEN 'running' ELSE 'pending' END, CASE WHEN is_claimed THEN owner END, CASE WHEN is_claimed THEN clock_timestamp() + $9::interval END, is_claimed::int, is_claimed::int, CASE WHEN is_claimed THEN clock_timestamp() END
    FROM calls WHERE step IS NOT NULL
    ON CONFLICT (job_id, step) DO NOTHING
    RETURNING id, job_id, step, queue, priority, status, lease_owner, epoch, attempt, handler, timeout_seconds
), arguments AS (
    INSERT INTO item (task_id, parent_id, number, value)
    SELECT child, workflow, number, argument FROM calls WHERE step IS NOT NULL
    ON CONFLICT (task_id) DO NOTHING
), suspended_workflows AS (
    -- Writes only tasks that pass the guard (guard.py). The attempt does not count. Earlier errors and losses (attempts
    -- whose worker was lost) no longer count. `journaled`: the workflow has called something.
    UPDATE task t
    SET status = 'waiting', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1, losses = 0, errors = 0,
        journaled = true,
        wake_at = CASE WHEN t.news = p.known_news THEN t.news + p.ends END,
        available_at = CASE WHEN t.news <> p.known_news THEN clock_timestamp()
                            WHEN p.delay IS NULL THEN 'infinity'
                            ELSE statement_timestamp() + make_interval(secs => p.delay) END
    FROM held JOIN unnest($5::int[], $6::int[], $7::float8[]) WITH ORDINALITY AS p(known_news, ends, delay, nth)
        ON p.nth = held.nth
    WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority, t.available_at, t.news <> p.known_news AS is_due
), advanced_jobs AS (
    UPDATE job j
    SET event_seq = j.event_seq + counts.suspended + counts.claimed,
        leased = j.leased - counts.suspended + counts.claimed, steps_left = j.steps_left + counts.started
    FROM (
        SELECT job_id, sum(suspended)::int AS suspended, sum(started)::int AS started, sum(claimed)::int AS claimed
        FROM (SELECT job_id, 1 AS suspended, 0 AS started, 0 AS claimed FROM suspended_workflows
              UNION ALL SELECT job_id, 0, 1, (status = 'running')::int FROM steps) AS changes
        GROUP BY job_id
    ) AS counts
    WHERE j.id = counts.job_id
    -- `last_seq`: the number of the job's last event before this statement.
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - counts.suspended - counts.claimed AS last_seq,
              counts.suspended, counts.started, j.pipeline, j.pipeline_version, j.inputs, j.output_prefix, j.gated,
              j.grace_seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, a.last_seq + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id), a.tenant_id, 'suspended',
           a.status, s.id, s.step, 'waiting', s.epoch,
           jsonb_build_object('until', nullif(s.available_at, 'infinity'), 'steps', a.started)
    FROM suspended_workflows s JOIN advanced_jobs a ON a.id = s.job_id
), claimed_steps AS MATERIALIZED (
    -- The steps that this statement claims. A step's name may have a number after `#`; an object's key has a point
    -- instead.
    SELECT s.*, a.tenant_id, a.pipeline, a.pipeline_version, a.inputs, a.trace, a.gated, a.grace_seconds,
           a.status AS job_status, a.output_prefix || '/' || replace(s.step, '#', '.') AS output_prefix,
           a.last_seq + a.suspended + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id) AS seq
    FROM steps s JOIN advanced_jobs a ON a.id = s.job_id
    WHERE s.status = 'running'
), claim_events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT job_id, seq, tenant_id, 'claimed', job_status, id, step, 'running', epoch,
           jsonb_build_object('worker', lease_owner, 'attempt', attempt)
    FROM claimed_steps
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT s.id, s.job_id, s.queue, s.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM (SELECT id, job_id, queue, priority FROM steps WHERE status = 'pending'
          UNION ALL SELECT id, job_id, queue, priority FROM suspended_workflows WHERE is_due) AS s
    JOIN advanced_jobs a ON a.id = s.job_id
    RETURNING id, task_id, queue, priority, headers
)
-- The verdict for each lease.
SELECT a.id AS task_id, 'waiting' AS state,
       -- The second case: an earlier suspend of this lease has succeeded, and its answer was lost.
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'waiting'), false) AS settled,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers,
       NULL::jsonb AS next
FROM lease_batch a LEFT JOIN suspended_workflows s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
-- The hints to publish.
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL FROM hints h
UNION ALL
-- The steps that were claimed.
SELECT t.id, NULL, NULL, NULL, NULL, NULL, NULL, jsonb_build_object(
    'id', t.id, 'epoch', t.epoch, 'attempt', t.attempt, 'job_id', t.job_id, 'tenant_id', t.tenant_id, 'step', t.step,
    'queue', t.queue, 'priority', t.priority, 'errors', 0, 'crashes', 0, 'was', 'pending', 'waited', 0,
    'handler', t.handler, 'timeout_seconds', t.timeout_seconds, 'pipeline', t.pipeline,
    'pipeline_version', t.pipeline_version, 'inputs', t.inputs, 'output_prefix', t.output_prefix, 'trace', t.trace,
    'gated', t.gated, 'grace_seconds', t.grace_seconds, 'cancelling', false, 'is_last', false)
FROM claimed_steps t
