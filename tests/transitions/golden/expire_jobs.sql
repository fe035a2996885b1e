-- expire_jobs
WITH ended_steps AS (
    UPDATE task t
    SET status = CASE WHEN t.status = 'running' THEN 'cancelled' ELSE 'skipped' END,
        lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    WHERE t.job_id = ANY($1::uuid[]) AND t.status IN ('blocked', 'pending', 'running', 'retry', 'waiting')
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, t.status
), task_events AS (
    SELECT ended_steps.*, row_number() OVER (PARTITION BY job_id ORDER BY position) AS nth,
           count(*) OVER (PARTITION BY job_id)::int AS event_count
    FROM ended_steps
), advanced_jobs AS (
    UPDATE job j
    SET status = 'expired', finished_at = clock_timestamp(), leased = 0, held = false,
        expires_at = clock_timestamp() + make_interval(secs => j.keep_seconds),
        error = CASE WHEN before.held AND before.start_within_seconds IS NOT NULL
            THEN jsonb_build_object('code', 'not_started_in_time', 'retryable', true,
                                    'message', 'the job waited at its limits for longer than its start_within')
            ELSE jsonb_build_object('code', 'deadline_exceeded', 'message', 'the job ran past its deadline',
                                    'retryable', true) END,
        event_seq = j.event_seq + per_job.event_count
    FROM (SELECT DISTINCT job_id, event_count FROM task_events) AS per_job
    JOIN job AS before ON before.id = per_job.job_id
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.event_seq - per_job.event_count AS seq, j.pipeline, before.status AS old_status,
              extract(epoch FROM clock_timestamp() - j.created_at)::float8 AS seconds
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT e.job_id, a.seq + e.nth, a.tenant_id, e.status,
           CASE WHEN e.nth = e.event_count THEN 'expired' ELSE a.old_status END, e.id, e.step, e.status, e.epoch
    FROM task_events e JOIN advanced_jobs a ON a.id = e.job_id
)
SELECT id AS ended_job, pipeline, 'expired' AS outcome, seconds FROM advanced_jobs
