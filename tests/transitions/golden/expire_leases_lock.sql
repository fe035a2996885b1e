-- expire_leases_lock
SELECT j.id FROM task t JOIN job j ON j.id = t.job_id
WHERE t.status = 'running' AND ((t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)) OR t.lease_owner = ANY($1::uuid[]))
  AND ($3::uuid IS NULL OR t.job_id = $3) AND t.job_id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'leases' AND q.retry_at > statement_timestamp())) AND j.status <> 'cancel_requested'
LIMIT $2
FOR UPDATE OF j SKIP LOCKED
