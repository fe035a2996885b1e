-- move_resume_tasks
UPDATE task t SET available_at = t.available_at - interval '8766000 hours'
WHERE t.tenant_id = $1 AND t.available_at > '2900-01-01+00' AND t.available_at < 'infinity' AND NOT EXISTS (SELECT 1 FROM run r WHERE r.job_id = t.job_id AND r.scheduled_at = t.available_at)
