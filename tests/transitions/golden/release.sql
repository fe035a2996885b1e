-- release
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
      AND (jobs.status <> 'cancel_requested' OR t.journaled)
    ORDER BY t.id
    FOR UPDATE OF t
), released_tasks AS (
    -- Writes only tasks that pass the guard (guard.py). The attempt does not count.
    UPDATE task t
    SET status = 'pending', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        available_at = clock_timestamp()
    FROM held WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority
), advanced_jobs AS (
    -- In a job that is being cancelled, `leased` still counts a released workflow, which must run once more to see the
    -- cancel.
    UPDATE job j
    SET event_seq = j.event_seq + per_job.released_count,
        leased = j.leased - CASE j.status WHEN 'cancel_requested' THEN 0 ELSE per_job.released_count END
    FROM (SELECT job_id, count(*)::int AS released_count FROM released_tasks GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.released_count AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.id), a.tenant_id, 'released',
           a.status, r.id, r.step, 'pending', r.epoch
    FROM released_tasks r JOIN advanced_jobs a ON a.id = r.job_id
), hints AS (
    -- Queues `ext:` belong to external workers, which poll. The caller publishes the hints. After `relay_at` the relay
    -- (a duty of the workers) publishes those that the caller has not published.
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT r.id, r.job_id, r.queue, r.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM released_tasks r JOIN advanced_jobs a ON a.id = r.job_id
    WHERE NOT starts_with(r.queue, 'ext:')
    RETURNING id, task_id, queue, priority, headers
)
-- `settled` is also true if this statement ran before, and only its answer was lost. A task whose lease the sweeper has
-- ended is pending, too, but then the lease has a failure. (PostgreSQL could turn an EXISTS into a hash table of all
-- failures.)
SELECT a.id AS task_id,
       coalesce(r.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'pending' AND (
           SELECT f.cause FROM failure f WHERE f.task_id = a.id AND f.epoch = a.epoch) IS NULL), false) AS settled,
       'pending' AS state,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN released_tasks r ON r.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hints h
