-- move_postpone_tasks
UPDATE task SET available_at = available_at
WHERE tenant_id = $1 AND status IN ('pending', 'retry', 'waiting') AND available_at < '2900-01-01+00'
