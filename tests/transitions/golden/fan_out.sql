-- fan_out
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
), parts AS MATERIALIZED (
    -- Only the parts of tasks whose lease is still valid.
    SELECT p.*, held.nth AS place,
           CASE WHEN EXISTS (
               SELECT 1 FROM task o JOIN item i ON i.task_id = o.id
               WHERE o.job_id = t.job_id AND o.step = p.part || '.0' AND i.parent_id <> p.parent
           ) AND NOT EXISTS (SELECT 1 FROM item i WHERE i.parent_id = p.parent) THEN t.step || '.' ELSE '' END
           || p.part || '.' || p.number AS step
    FROM jsonb_to_recordset($4::jsonb) AS p(
        parent uuid, id uuid, part text, number int, queue text, max_attempts smallint, handler text, value jsonb)
    JOIN held ON held.id = p.parent JOIN task t ON t.id = held.id
), parent AS (
    -- Writes only tasks that pass the guard (guard.py): the step waits for its parts, and the attempt does not count.
    UPDATE task t
    SET status = 'blocked', lease_owner = NULL, lease_until = NULL, attempt = t.attempt - 1,
        waiting_on = per_parent.part_count
    FROM (SELECT parent, place, count(*)::int AS part_count FROM parts GROUP BY parent, place) AS per_parent
    WHERE t.id = per_parent.parent
    RETURNING t.id, t.job_id, t.tenant_id, t.step, t.position, t.priority, t.epoch, t.cancelable,
              per_parent.part_count, per_parent.place
), outputs AS (
    INSERT INTO output (task_id, name, job_id, tenant_id, step, key, size, sha256, content_type)
    SELECT d.id, o.name, d.job_id, d.tenant_id, d.step, o.key, o.size, o.sha256, o.content_type
    FROM parent d CROSS JOIN LATERAL jsonb_to_recordset(($5::jsonb[])[d.place] -> 'of')
        AS o(name text, key text, size bigint, sha256 text, content_type text)
    ON CONFLICT (task_id, name) DO UPDATE
    SET key = excluded.key, size = excluded.size, sha256 = excluded.sha256, content_type = excluded.content_type
), part_tasks AS (
    INSERT INTO task (id, job_id, tenant_id, step, position, queue, priority, status, unblocks, max_attempts,
                      handler, cancelable)
    SELECT p.id, parent.job_id, parent.tenant_id, p.step, parent.position, p.queue, parent.priority, 'pending',
           ARRAY[parent.id], p.max_attempts, p.handler, parent.cancelable
    FROM parts p JOIN parent ON parent.id = p.parent
    RETURNING id, job_id, queue, priority
), items AS (
    -- jsonb_to_recordset makes NULL of the JSON null.
    INSERT INTO item (task_id, parent_id, number, value)
    SELECT id, parent, number, coalesce(value, 'null') FROM parts
), advanced_jobs AS (
    UPDATE job j
    SET leased = j.leased - per_job.step_count, steps_left = j.steps_left + per_job.part_count,
        event_seq = j.event_seq + per_job.step_count
    FROM (
        SELECT job_id, count(*)::int AS step_count, sum(part_count)::int AS part_count FROM parent GROUP BY job_id
    ) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.status, j.trace, j.event_seq - per_job.step_count AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT p.job_id, a.seq + row_number() OVER (PARTITION BY p.job_id ORDER BY p.id), a.tenant_id, 'fanned_out',
           a.status, p.id, p.step, 'blocked', p.epoch, jsonb_build_object('parts', p.part_count)
    FROM parent p JOIN advanced_jobs a ON a.id = p.job_id
), hints AS (
    INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
    SELECT m.id, m.job_id, m.queue, m.priority, a.trace, clock_timestamp() + interval '1 second'
    FROM part_tasks m JOIN advanced_jobs a ON a.id = m.job_id
    RETURNING id, task_id, queue, priority, headers
)
SELECT a.id AS task_id, coalesce(p.id IS NOT NULL OR (t.epoch = a.epoch AND t.status = 'blocked'), false) AS settled,
       'blocked' AS state,
       NULL::bigint AS outbox_id, NULL::text AS queue, NULL::int AS priority, NULL::jsonb AS headers
FROM lease_batch a LEFT JOIN parent p ON p.id = a.id LEFT JOIN task t ON t.id = a.id
UNION ALL
SELECT h.task_id, NULL, NULL, h.id, h.queue, h.priority, h.headers FROM hints h
