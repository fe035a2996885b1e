-- claim
WITH jobs AS MATERIALIZED (
    -- Waits for the lock of each job. With SKIP LOCKED the hints of a job that another statement has locked would be
    -- acknowledged without a claim. The wait is short, because the other statement is short.
    SELECT j.id, hinted_tasks.tasks, hinted_tasks.statuses, j.event_seq, j.tenant_id, j.pipeline, j.pipeline_version, j.params, j.inputs, j.output_prefix, j.trace, j.gated, CASE WHEN j.cancel_by IS NULL THEN j.grace_seconds ELSE greatest(ceil(extract(epoch FROM j.cancel_by - clock_timestamp())), 0)::int END AS grace_seconds, j.status = 'cancel_requested' AS cancelling, j.single_task
    FROM (
        SELECT t.job_id, array_agg(t.id) AS tasks, array_agg(t.status) AS statuses
        FROM task t WHERE t.id = ANY($1::uuid[]) GROUP BY t.job_id
    ) AS hinted_tasks JOIN job j ON j.id = hinted_tasks.job_id
    WHERE j.status IN ('pending', 'queued', 'running', 'waiting_worker', 'cancel_requested')
    ORDER BY j.id
    FOR UPDATE OF j
), job_tasks AS MATERIALIZED (
    -- The sort reads all of `jobs` first, so all jobs are locked before the first task. `was`: the task's status until
    -- now.
    SELECT hinted_task.id, hinted_task.was, jobs.event_seq, jobs.tenant_id, jobs.pipeline, jobs.pipeline_version, jobs.params, jobs.inputs, jobs.output_prefix, jobs.trace, jobs.gated, jobs.grace_seconds, jobs.cancelling, jobs.single_task
    FROM jobs CROSS JOIN LATERAL unnest(jobs.tasks, jobs.statuses) AS hinted_task(id, was)
    ORDER BY hinted_task.id
)
, claimed_tasks AS (
    UPDATE task t
    SET status = 'running',
        lease_owner = $2,
        lease_until = clock_timestamp() + $3::interval,
        epoch = t.epoch + 1,
        attempt = t.attempt + 1,
        losses = t.losses + (job_tasks.was = 'running' AND NOT ($6 AND t.lease_owner = $2))::int,
        started_at = clock_timestamp(),
        claim_seq = CASE WHEN t.id = job_tasks.single_task AND t.epoch = 0 THEN job_tasks.event_seq + 1
                         ELSE t.claim_seq END
    FROM job_tasks
    WHERE t.id = job_tasks.id AND (t.status = 'running') = (job_tasks.was = 'running')
      AND NOT EXISTS (SELECT 1 FROM paused_queue p WHERE p.queue = t.queue)
      AND CASE WHEN t.status IN ('pending', 'retry', 'waiting')
               THEN t.available_at <= clock_timestamp() AND (t.journaled OR NOT job_tasks.cancelling)
               WHEN t.status = 'running' AND t.lease_owner = $2 AND $6
               THEN t.journaled OR NOT job_tasks.cancelling
               WHEN t.status = 'running'
               THEN NOT job_tasks.cancelling AND t.losses < $4
                    AND ((t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)) OR t.lease_owner = ANY(ARRAY(
    SELECT owner.id FROM unnest($5::uuid[]) AS owner(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = owner.id AND EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid)))))
               ELSE false END
    RETURNING t.id, t.job_id, t.step, t.queue, t.priority, t.epoch, t.attempt, t.errors, t.crashes, t.handler,
              t.timeout_seconds, t.unblocks = '{}' AS is_last, job_tasks.was,
              t.epoch = 1 AND t.claim_seq IS NOT NULL AS has_derived_event,
              extract(epoch FROM clock_timestamp() - t.available_at)::float8 AS waited,
              job_tasks.event_seq, job_tasks.tenant_id, job_tasks.pipeline, job_tasks.pipeline_version, CASE WHEN t.contained THEN (SELECT i.value FROM item i WHERE i.task_id = t.id) ELSE job_tasks.params END AS params, job_tasks.inputs, CASE WHEN t.contained OR strpos(t.step, '.') > 0
                     THEN job_tasks.output_prefix || '/' || replace(t.step, '#', '.')
                   ELSE job_tasks.output_prefix END AS output_prefix, job_tasks.trace, job_tasks.gated, job_tasks.grace_seconds, job_tasks.cancelling
), numbered_tasks AS MATERIALIZED (
    -- The claimed tasks, numbered within their job for its events: `nth` of `task_count`. `leased`: how many of these
    -- tasks the job did not count as leased before. `becomes`: the job's new status.
    SELECT c.*, row_number() OVER (PARTITION BY job_id ORDER BY id) AS nth, (count(*) OVER job)::int AS task_count,
           (count(*) FILTER (WHERE was <> 'running' AND NOT cancelling) OVER job)::int AS leased,
           CASE WHEN cancelling THEN 'cancel_requested'
                WHEN bool_and(starts_with(queue, 'ext:')) OVER job THEN 'waiting_worker' ELSE 'running' END AS becomes
    FROM claimed_tasks c
    WINDOW job AS (PARTITION BY job_id)
), advanced_jobs AS (
    UPDATE job j
    SET status = per_job.becomes,
        leased = j.leased + per_job.leased,
        started_at = coalesce(j.started_at, clock_timestamp()),
        event_seq = j.event_seq + per_job.task_count
    FROM numbered_tasks per_job
    WHERE per_job.nth = 1 AND j.id = per_job.job_id
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch, data)
    SELECT c.job_id, c.event_seq + c.nth, c.tenant_id, CASE WHEN c.was = 'running' THEN 'taken_over' ELSE 'claimed' END,
           c.becomes, c.id, c.step, 'running', c.epoch, jsonb_build_object('worker', $2::uuid, 'attempt', c.attempt)
    FROM numbered_tasks c WHERE NOT c.has_derived_event
)

SELECT * FROM numbered_tasks ORDER BY id
