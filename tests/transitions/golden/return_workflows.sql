-- return_workflows
WITH returned_workflows AS (
    UPDATE task t
    SET status = 'pending', lease_owner = NULL, lease_until = NULL, losses = t.losses + 1,
        available_at = clock_timestamp()
    FROM job j
    WHERE t.job_id = ANY($2::uuid[]) AND t.journaled AND t.losses < $3 AND CASE WHEN t.status = 'running' THEN true ELSE false END
      AND ((t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)) OR t.lease_owner = ANY(ARRAY(
    SELECT owner.id FROM unnest($1::uuid[]) AS owner(id)
    WHERE NOT EXISTS (SELECT 1 FROM worker w WHERE w.id = owner.id AND EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid = 7305::oid AND l.objid = w.presence_key::oid)))))
      AND j.id = t.job_id AND j.cancel_by >= clock_timestamp()
    RETURNING t.id, t.job_id, t.step, t.epoch, t.queue, t.priority
), advanced_jobs AS (
    UPDATE job j SET event_seq = j.event_seq + per_job.returned_count
    FROM (SELECT job_id, count(*)::int AS returned_count FROM returned_workflows GROUP BY job_id) AS per_job
    WHERE j.id = per_job.job_id
    RETURNING j.id, j.tenant_id, j.trace, j.event_seq - per_job.returned_count AS seq
), events AS (
    INSERT INTO event (job_id, seq, tenant_id, kind, job_status, task_id, step, task_status, epoch)
    SELECT r.job_id, a.seq + row_number() OVER (PARTITION BY r.job_id ORDER BY r.id), a.tenant_id, 'lost',
           'cancel_requested', r.id, r.step, 'pending', r.epoch
    FROM returned_workflows r JOIN advanced_jobs a ON a.id = r.job_id
)
INSERT INTO outbox (task_id, job_id, queue, priority, headers, relay_at)
SELECT r.id, r.job_id, r.queue, r.priority, a.trace, clock_timestamp()
FROM returned_workflows r JOIN advanced_jobs a ON a.id = r.job_id
