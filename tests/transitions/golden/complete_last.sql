-- complete_last
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
    FROM leases a WHERE t.id = a.id AND CASE WHEN t.lease_owner = a.owner AND t.epoch = a.epoch AND t.status = 'running' THEN true ELSE false END AND CASE WHEN t.unblocks = '{}' THEN true ELSE false END
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.queue, t.priority, t.unblocks, t.done_seq, a.place,
              a.job_status, a.steps_left, a.leased, a.external, a.tenant_id, a.trace, a.event_seq, a.pipeline,
              a.created_at
), numbered_tasks AS MATERIALIZED (
    -- Each completed task is the `nth` of the `completed_count` tasks of its job that this statement completes.
    SELECT d.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth,
           (count(*) OVER (PARTITION BY job_id))::int AS completed_count
    FROM succeeded_tasks d
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
        leased = j.leased - per_job.completed_count,
        status = per_job.next_status,
        finished_at = CASE WHEN per_job.next_status IN ('succeeded', 'cancelled') THEN clock_timestamp() END,
        expires_at = CASE WHEN per_job.next_status IN ('succeeded', 'cancelled')
                          THEN clock_timestamp() + make_interval(secs => j.keep_seconds) END,
        event_seq = j.event_seq + per_job.completed_count
    FROM completed_tasks per_job
    WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    -- A job shows its next status in its last event only.
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT job_id, event_seq + nth, tenant_id, 'completed',
           CASE WHEN nth < completed_count THEN job_status ELSE next_status END, id, step, 'succeeded', epoch
    FROM completed_tasks WHERE done_seq IS NULL
), results AS (
    INSERT INTO result (task_id, value)
    SELECT d.id, ($4::jsonb[])[d.place] FROM succeeded_tasks d WHERE ($4::jsonb[])[d.place] IS NOT NULL
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
