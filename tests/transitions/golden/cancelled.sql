-- cancelled
SELECT t.id FROM unnest($2::uuid[]) AS lease(id) JOIN task t ON t.id = lease.id JOIN job j ON j.id = t.job_id
WHERE t.lease_owner = $1 AND t.cancelable AND CASE WHEN t.status = 'running' THEN true ELSE false END
  AND CASE WHEN j.cancel_by IS NOT NULL AND j.finished_at IS NULL THEN true ELSE false END
