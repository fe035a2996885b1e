-- debounce
WITH submissions AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset($2::jsonb)
        AS a(id uuid, pipeline text, key text, params jsonb, delay float8, nth int)
), waiting_jobs AS MATERIALIZED (
    SELECT j.id, a.params, a.delay, a.nth
    FROM submissions a JOIN job j ON j.tenant_id = $1 AND j.pipeline = a.pipeline AND j.dedupe_key = a.key
    WHERE CASE WHEN j.finished_at IS NULL THEN true ELSE false END
    ORDER BY j.id
    FOR UPDATE OF j
), postponed_tasks AS (
    UPDATE task t SET available_at = clock_timestamp() + make_interval(secs => w.delay)
    FROM waiting_jobs w
    WHERE t.job_id = w.id AND CASE WHEN t.status IN ('waiting', 'blocked') THEN true ELSE false END
      AND CASE t.epoch WHEN 0 THEN true ELSE (t.epoch = (SELECT count(*) FROM history e
                          WHERE e.job_id = t.job_id AND e.task_id = t.id AND e.data ? 'put_off')
         AND NOT EXISTS (SELECT 1 FROM gate_job g WHERE g.job_id = t.job_id)) END
    RETURNING t.id, t.job_id, t.available_at
), known_again AS (
    DELETE FROM unknown_task u USING postponed_tasks p WHERE u.task_id = p.id
), at_limits AS (
    UPDATE gate_job g SET ready_at = p.available_at FROM postponed_tasks p
    WHERE g.job_id = p.job_id AND g.admitted_at IS NULL
), runs AS (
    UPDATE run r SET scheduled_at = p.available_at FROM postponed_tasks p WHERE r.job_id = p.job_id
), jobs AS (
    -- The job's time limit begins when the job may start. While a job is `held` (waits at its concurrency limits), its
    -- time limit is `start_within_seconds`. A job that has started loses its dedupe key.
    UPDATE job j
    SET params = CASE WHEN p.job_id IS NULL THEN j.params ELSE w.params END,
        dedupe_key = CASE WHEN p.job_id IS NULL THEN NULL ELSE j.dedupe_key END,
        deadline_at = CASE WHEN p.job_id IS NULL THEN j.deadline_at
                           ELSE p.available_at + make_interval(secs => CASE WHEN j.held THEN j.start_within_seconds
                                                                            ELSE j.timeout_seconds END) END
    FROM waiting_jobs w LEFT JOIN postponed_tasks p ON p.job_id = w.id
    WHERE j.id = w.id
    RETURNING j.id, w.nth, p.job_id IS NOT NULL AS is_postponed
), remembered AS (
    INSERT INTO idempotency (tenant_id, key, request_hash, status_code, body, locked_until, expires_at)
    SELECT $1, ' debounced ' || a.id::text, '', 202, convert_to(jobs.id::text, 'UTF8'), clock_timestamp(),
           clock_timestamp() + $3::interval
    FROM jobs JOIN submissions a ON a.nth = jobs.nth WHERE jobs.is_postponed
    ON CONFLICT (tenant_id, key) DO NOTHING
)
SELECT id, nth FROM jobs WHERE is_postponed
