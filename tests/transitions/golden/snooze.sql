-- snooze
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
), snoozed_tasks AS (
    -- Writes only tasks that pass the guard (guard.py). The attempt does not count. If the step's own code asked to
    -- snooze, the step makes progress: its earlier losses (attempts whose worker was lost) no longer count.
    UPDATE task t
    SET status = 'waiting', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        available_at = clock_timestamp() + make_interval(secs => p.delay),
        losses = CASE WHEN p.by_step THEN 0 ELSE t.losses END
    FROM held
    JOIN unnest($4::float8[], $5::jsonb[], $7::text[], $8::bool[])
        WITH ORDINALITY AS p(delay, note, missing_handler, by_step, nth) ON p.nth = held.nth
    WHERE t.id = held.id
    RETURNING t.id, t.job_id, t.tenant_id, t.step, t.epoch, t.queue, t.available_at, p.note, p.missing_handler,
              p.by_step, held.nth AS place  -- as write_outputs names it
), notes AS (
    INSERT INTO note (task_id, value) SELECT id, note FROM snoozed_tasks WHERE jsonb_typeof(note) = 'object'
    ON CONFLICT (task_id) DO UPDATE SET value = excluded.value
), unknown_tasks AS (
    INSERT INTO unknown_task (task_id, epoch, queue, handler)
    SELECT id, epoch, queue, missing_handler FROM snoozed_tasks WHERE missing_handler IS NOT NULL
    ON CONFLICT (task_id) DO UPDATE
    SET epoch = excluded.epoch, queue = excluded.queue, handler = excluded.handler
), outputs AS (
    INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)
    SELECT d.id, o.name, d.job_id, d.tenant_id, d.step, o.key, o.size, o.sha256, o.content_type
    FROM snoozed_tasks d CROSS JOIN LATERAL jsonb_to_recordset(($6::jsonb[])[d.place] -> 'of')
        AS o(name text, key text, size bigint, sha256 text, content_type text)
    ON CONFLICT (task_id, name) DO UPDATE
    SET key = excluded.key, size = excluded.size, sha256 = excluded.sha256, content_type = excluded.content_type
), advanced_jobs AS (
    UPDATE job j
    SET event_seq = j.event_seq + per_job.snoozed_count,
        leased = j.leased - CASE j.status WHEN 'cancel_requested' THEN 0 ELSE per_job.snoozed_count END
    FROM (SELECT job_id, count(*)::int AS snoozed_count FROM snoozed_tasks GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.event_seq - per_job.snoozed_count AS seq
), events AS (
    -- An event of a snooze has the kind `parked`. `put_off`: the code of the step did not run, so a debounce
    -- (debounce.py) does not count the claim. In a job that is being cancelled, a failed workflow snoozes, too.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT s.job_id, j.seq + row_number() OVER (PARTITION BY s.job_id ORDER BY s.id), j.tenant_id, 'parked',
           j.status, s.id, s.step, 'waiting', s.epoch, jsonb_strip_nulls(jsonb_build_object(
               'until', s.available_at,
               'put_off', CASE WHEN NOT s.by_step AND j.status <> 'cancel_requested' THEN true END))
    FROM snoozed_tasks s JOIN advanced_jobs j ON j.id = s.job_id
)
-- A repeated call finds the tasks waiting already: they are settled, too.
SELECT a.id AS task_id, 'waiting' AS state,
       coalesce(s.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'waiting'), false) AS settled
FROM lease_batch a LEFT JOIN snoozed_tasks s ON s.id = a.id LEFT JOIN task t ON t.id = a.id
