-- acknowledge_cancel
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
), stopped_steps AS (
    -- Writes only tasks that pass the guard (guard.py).
    UPDATE task t
    SET status = 'cancelled', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, NULL::jsonb AS data
)
, advanced_jobs AS (
    UPDATE job j
    SET leased = j.leased - per_job.stopped_count,
        status = CASE WHEN j.leased = per_job.stopped_count THEN 'cancelled' ELSE j.status END,
        finished_at = CASE WHEN j.leased = per_job.stopped_count THEN clock_timestamp() END,
        expires_at = CASE WHEN j.leased = per_job.stopped_count
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + per_job.stopped_count
    FROM (SELECT job_id, count(*)::int AS stopped_count FROM stopped_steps GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - per_job.stopped_count AS seq, per_job.stopped_count,
              j.pipeline, extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, a.seq + s.nth, a.tenant_id, 'cancelled',
           CASE WHEN s.nth < a.stopped_count THEN 'cancel_requested' ELSE a.status END, s.id, s.step, 'cancelled',
           s.epoch, s.data
    FROM (
        SELECT stopped_steps.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth FROM stopped_steps
    ) AS s JOIN advanced_jobs a ON a.id = s.job_id
)
SELECT a.id AS task_id, 'cancelled' AS state,
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'cancelled'), false) AS settled,
       e.id AS ended_job, e.pipeline, e.status AS outcome, e.seconds
FROM lease_batch a LEFT JOIN stopped_steps s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
LEFT JOIN advanced_jobs e ON e.id = s.job_id AND e.status = 'cancelled'
