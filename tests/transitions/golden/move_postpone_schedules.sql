-- move_postpone_schedules
UPDATE schedule SET next_run_at = next_run_at WHERE tenant_id = $1 AND next_run_at < '2900-01-01+00'
