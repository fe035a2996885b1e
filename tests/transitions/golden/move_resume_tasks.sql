-- move_resume_tasks
UPDATE task SET available_at = available_at - interval '8766000 hours'
WHERE tenant_id = $1 AND available_at > '2900-01-01+00' AND available_at < 'infinity'
