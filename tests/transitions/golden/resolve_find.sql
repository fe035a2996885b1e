-- resolve_find
SELECT t.id AS task_id, t.epoch, n.value AS note, j.status AS job_status FROM job j
JOIN task t ON t.job_id = j.id AND t.step = $3 JOIN note n ON n.task_id = t.id
WHERE j.id = $1 AND j.tenant_id = $2 AND j.status IN ('failed', 'expired', 'cancelled') AND t.status IN ('failed', 'cancelled', 'skipped')
      AND NOT t.contained AND n.value ? $4
      AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
