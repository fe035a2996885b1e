-- end_cancels_lock
SELECT j.id FROM job j
WHERE j.cancel_by IS NOT NULL AND j.finished_at IS NULL
  AND ($2::uuid IS NULL OR j.id = $2) AND j.id <> ALL(ARRAY(SELECT q.unit::uuid FROM quarantine q WHERE q.duty = 'cancels' AND q.retry_at > statement_timestamp()))
  AND EXISTS (
    SELECT 1 FROM task t
    WHERE t.job_id = j.id
      AND CASE WHEN t.status = 'running' THEN (t.cancelable AND j.cancel_by < clock_timestamp())
                   OR (t.lease_until < clock_timestamp()
    AND (t.lease_until < clock_timestamp() - interval '10 seconds' OR (
        SELECT w.incarnation <> greatest(pg_postmaster_start_time(), (SELECT stats_reset FROM pg_stat_bgwriter)) FROM worker w WHERE w.id = t.lease_owner) IS NOT TRUE)) OR t.lease_owner = ANY($3::uuid[])
               ELSE t.finished_at IS NULL AND j.cancel_by < clock_timestamp() END)
ORDER BY j.cancel_by LIMIT $1
FOR UPDATE OF j SKIP LOCKED
