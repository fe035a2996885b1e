-- complete
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
), leases AS MATERIALIZED (
    -- Each lease with its job. The sort reads all of `jobs` first: so all jobs are locked before the first task is.
    SELECT a.owner, a.id, a.epoch, a.nth AS place, jobs.status AS job_status, jobs.steps_left, jobs.leased,
           jobs.external, jobs.tenant_id, jobs.trace, jobs.event_seq, jobs.pipeline, jobs.created_at,
           CASE WHEN jobs.steps_left = 1 THEN jobs.single_task END AS last_task
    FROM jobs CROSS JOIN LATERAL unnest(jobs.owners, jobs.ids, jobs.epochs, jobs.places) AS a(owner, id, epoch, nth)
    ORDER BY a.id
), succeeded_tasks AS (
    -- The leases' tasks that pass the guard (guard.py) succeed. If a renewal of the lease, or a write of the attempt's
    -- note, has locked a task's row, this write waits, and then checks the guard on the newest version of the row.
    -- Other settlements lock the rows before they write. This statement does not, because each such lock is one more
    -- record in the WAL. If a job has a single task, and the task succeeds at its first claim, this statement writes no
    -- event. The view `history` derives the events of the claim and of the completion from `claim_seq`, `claimed_by`
    -- and `done_seq`.
    UPDATE task t
    SET status = 'succeeded', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp(),
        claimed_by = CASE WHEN t.claim_seq IS NOT NULL AND t.epoch = 1 THEN t.lease_owner END,
        done_seq = CASE WHEN t.id = a.last_task AND t.epoch = 1 THEN a.event_seq + 1 END
    FROM leases a WHERE t.id = a.id AND CASE WHEN t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running' THEN true ELSE false END
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.queue, t.priority, t.unblocks, t.done_seq, a.place,
              a.job_status, a.steps_left, a.leased, a.external, a.tenant_id, a.trace, a.event_seq, a.pipeline,
              a.created_at
), numbered_tasks AS MATERIALIZED (
    -- Each completed task is the `nth` of the `completed_count` tasks of its job that this statement completes.
    SELECT d.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth,
           (count(*) OVER (PARTITION BY job_id))::int AS completed_count,
           ($6::bool[])[d.place] AND d.external = 0 AND d.job_status <> 'cancel_requested' AS claim_next
    FROM succeeded_tasks d
), dependents AS MATERIALIZED (
    -- Each step (`child`) that needs `ended_needs` of the completed tasks. `place`: the place of the lease whose worker
    -- may claim the step. `is_claimed`: the worker claims the step, because it is the first that the worker may claim.
    SELECT dep.*, claim.is_possible
               AND row_number() OVER (PARTITION BY dep.place, claim.is_possible ORDER BY c.position, c.id) = 1
               AS is_claimed
    FROM (
        SELECT child, count(*)::int AS ended_needs, (array_agg(d.trace))[1] AS trace,
               (array_agg(d.event_seq + d.completed_count))[1] AS seq,
               (array_agg(d.place) FILTER (WHERE d.claim_next))[1] AS place,
               (array_agg(d.queue) FILTER (WHERE d.claim_next))[1] AS queue,
               (array_agg(d.priority) FILTER (WHERE d.claim_next))[1] AS priority
        FROM numbered_tasks d, unnest(d.unblocks) AS child GROUP BY child
    ) AS dep JOIN task c ON c.id = dep.child
    CROSS JOIN LATERAL (
        SELECT dep.place IS NOT NULL AND c.queue = dep.queue AND c.priority <= dep.priority
               AND CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END
               AND NOT EXISTS (SELECT 1 FROM paused_queue q WHERE q.queue = c.queue) AS is_possible
    ) AS claim
), updated_dependents AS (
    -- Counts, in the row of each dependent step, the needs that have ended. Two statements cannot do this at once for
    -- steps of one job: each statement locks the job first.
    UPDATE task c
    SET waiting_on = CASE c.status WHEN 'blocked' THEN c.waiting_on - dep.ended_needs ELSE c.waiting_on END,
        news = CASE c.status WHEN 'blocked' THEN c.news ELSE c.news + dep.ended_needs END,
        wake_at = CASE WHEN CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END THEN NULL WHEN c.status = 'blocked' THEN c.wake_at
                       ELSE coalesce(c.wake_at, 2147483647) END,
        status = CASE WHEN NOT CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END THEN c.status WHEN dep.is_claimed THEN 'running'
                      WHEN c.status = 'waiting' THEN 'waiting' ELSE 'pending' END,
        lease_owner = CASE WHEN CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END AND dep.is_claimed THEN ($1::uuid[])[dep.place] ELSE c.lease_owner END,
        lease_until = CASE WHEN CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END AND dep.is_claimed THEN clock_timestamp() + $7::interval
                           ELSE c.lease_until END,
        epoch = c.epoch + (CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END AND dep.is_claimed)::int,
        attempt = c.attempt + (CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END AND dep.is_claimed)::int,
        started_at = CASE WHEN CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END AND dep.is_claimed THEN clock_timestamp() ELSE c.started_at END,
        available_at = CASE WHEN CASE c.status WHEN 'blocked' THEN c.waiting_on = dep.ended_needs WHEN 'waiting' THEN coalesce(c.news + dep.ended_needs >= c.wake_at, false) ELSE false END THEN clock_timestamp() ELSE c.available_at END
    FROM dependents dep
    WHERE c.id = dep.child AND CASE WHEN c.finished_at IS NULL THEN true ELSE false END
    RETURNING c.id, c.job_id, c.tenant_id, c.step, c.position, c.queue, c.priority, c.status, c.epoch, c.attempt,
              c.errors, c.crashes, c.handler, c.timeout_seconds, c.unblocks, c.wake_at, c.journaled, c.contained,
              dep.trace, dep.seq, dep.place
), claimed_steps AS MATERIALIZED (
    -- The steps that this statement claims.
    SELECT f.*, row_number() OVER (PARTITION BY job_id ORDER BY position, id) AS nth FROM updated_dependents f
    WHERE f.status = 'running' AND f.wake_at IS NULL
), completed_tasks AS MATERIALIZED (
    -- The job's next status. A job with external steps is `waiting_worker` while one of them can run.
    SELECT c.*,
           CASE WHEN c.steps_left = c.completed_count THEN 'succeeded'
                WHEN c.job_status = 'cancel_requested' AND c.leased = c.completed_count THEN 'cancelled'
                WHEN c.external = 0 OR c.job_status = 'cancel_requested' THEN c.job_status
                WHEN EXISTS (
                    SELECT 1 FROM task o WHERE o.job_id = c.job_id AND starts_with(o.queue, 'ext:')
                      AND o.finished_at IS NULL AND o.id NOT IN (SELECT d.id FROM succeeded_tasks d)
                      AND o.waiting_on <= (SELECT count(*) FROM succeeded_tasks d WHERE o.id = ANY(d.unblocks)))
                THEN 'waiting_worker' ELSE 'running' END AS next_status
    FROM numbered_tasks c
), advanced_jobs AS (
    UPDATE job j
    SET steps_left = j.steps_left - per_job.completed_count,
        leased = j.leased - per_job.completed_count + claimed_next.step_count,
        status = per_job.next_status,
        finished_at = CASE WHEN per_job.next_status IN ('succeeded', 'cancelled') THEN clock_timestamp() END,
        expires_at = CASE WHEN per_job.next_status IN ('succeeded', 'cancelled')
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + per_job.completed_count + claimed_next.step_count
    FROM completed_tasks per_job
    CROSS JOIN LATERAL (
        SELECT count(*)::int AS step_count FROM claimed_steps t WHERE t.job_id = per_job.job_id
    ) AS claimed_next
    WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    -- A job shows its next status in its last event only.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT job_id, event_seq + nth, tenant_id, 'completed',
           CASE WHEN nth < completed_count THEN job_status ELSE next_status END, id, step, 'succeeded', epoch
    FROM completed_tasks WHERE done_seq IS NULL
), claim_events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT t.job_id, t.seq + t.nth, t.tenant_id, 'claimed', 'running', t.id, t.step, 'running', t.epoch,
           jsonb_build_object('worker', ($1::uuid[])[t.place], 'attempt', t.attempt)
    FROM claimed_steps t
), outputs AS (
    INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)
    SELECT d.id, o.name, d.job_id, d.tenant_id, d.step, o.key, o.size, o.sha256, o.content_type
    FROM succeeded_tasks d CROSS JOIN LATERAL jsonb_to_recordset(($4::jsonb[])[d.place] -> 'of')
        AS o(name text, key text, size bigint, sha256 text, content_type text)
    ON CONFLICT (task_id, name) DO UPDATE
    SET key = excluded.key, size = excluded.size, sha256 = excluded.sha256, content_type = excluded.content_type
), results AS (
    INSERT INTO result (task_id, value)
    SELECT d.id, ($5::jsonb[])[d.place] FROM succeeded_tasks d WHERE ($5::jsonb[])[d.place] IS NOT NULL
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT f.id, f.job_id, f.queue, f.priority, f.trace, clock_timestamp() + interval '1 second'
    FROM updated_dependents f
    WHERE (f.status = 'pending' OR (f.status = 'waiting' AND f.wake_at IS NULL)) AND NOT starts_with(f.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
SELECT d.id AS task_id, true AS settled, 'succeeded' AS state,
       CASE WHEN d.next_status IN ('succeeded', 'cancelled') THEN d.job_id END AS ended_job, d.pipeline,
       d.next_status AS outcome, extract(epoch FROM clock_timestamp() - d.created_at)::float8 AS seconds,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers,
       NULL::jsonb AS next
FROM completed_tasks d
UNION ALL
SELECT a.id, coalesce(t.status = 'succeeded' AND t.epoch = a.epoch, false), 'succeeded', NULL, NULL, NULL, NULL, NULL,
       NULL, NULL, NULL, NULL
FROM lease_batch a LEFT JOIN task t ON t.id = a.id WHERE a.id NOT IN (SELECT d.id FROM succeeded_tasks d)
UNION ALL
SELECT h.task_id, NULL, NULL, NULL, NULL, NULL, NULL, h.id, h.queue, h.priority, h.headers, NULL
FROM hints h
UNION ALL
SELECT ($2::uuid[])[t.place], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, jsonb_build_object(
    'id', t.id, 'epoch', t.epoch, 'attempt', t.attempt, 'job_id', t.job_id, 'tenant_id', t.tenant_id, 'step', t.step,
    'queue', t.queue, 'priority', t.priority, 'errors', t.errors, 'crashes', t.crashes,
    'was', CASE WHEN t.journaled THEN 'waiting' ELSE 'blocked' END, 'waited', 0,
    'handler', t.handler, 'timeout_seconds', t.timeout_seconds, 'pipeline', j.pipeline,
    'pipeline_version', j.pipeline_version, 'params', j.params, 'inputs', j.inputs,
    'output_prefix', CASE WHEN t.contained OR strpos(t.step, '.') > 0
                     THEN j.output_prefix || '/' || replace(t.step, '#', '.')
                   ELSE j.output_prefix END,
    'trace', j.trace, 'gated', j.gated, 'grace_seconds', j.grace_seconds,
    'cancelling', false, 'is_last', t.unblocks = '{}')
FROM claimed_steps t JOIN job j ON j.id = t.job_id
