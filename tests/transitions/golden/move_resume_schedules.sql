-- move_resume_schedules
UPDATE schedule SET next_run_at = next_run_at - interval '8766000 hours'
WHERE tenant_id = $1 AND next_run_at > '2900-01-01+00' AND next_run_at < 'infinity'
