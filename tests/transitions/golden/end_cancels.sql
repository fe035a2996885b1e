-- end_cancels
WITH jobs AS MATERIALIZED (
    SELECT j.id, j.cancel_by < clock_timestamp() AS overdue FROM job j WHERE j.id = ANY($2::uuid[])
), stopped_steps AS (
    UPDATE task t
    SET status = 'cancelled', lease_owner = NULL, lease_until = NULL, finished_at = clock_timestamp()
    FROM jobs
    WHERE t.job_id = jobs.id AND t.job_id = ANY($2::uuid[])
      AND CASE WHEN t.status = 'running' THEN (jobs.overdue AND t.cancelable)
                   OR ((jobs.overdue OR NOT t.journaled OR t.losses >= $3)
                       AND ((t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)) OR t.lease_owner = ANY(ARRAY(
    SELECT owner.id FROM unnest($1::uuid[]) AS owner(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = owner.id AND EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid))))))
               ELSE jobs.overdue AND t.finished_at IS NULL END
    RETURNING t.id, t.job_id, t.step, t.position, t.epoch, jsonb_build_object('forced', true,
              'because', CASE WHEN jobs.overdue THEN 'the grace passed' ELSE 'the worker was lost' END) AS data
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
SELECT id AS ended_job, pipeline, status AS outcome, seconds FROM advanced_jobs WHERE status = 'cancelled'
