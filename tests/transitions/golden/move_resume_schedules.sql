-- move_resume_schedules
UPDATE schedule t SET next_run_at = t.next_run_at - interval '8766000 hours'
WHERE t.tenant_id = $1 AND t.next_run_at > '2900-01-01+00' AND t.next_run_at < 'infinity' AND NOT false
