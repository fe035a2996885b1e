-- resolve_lock
SELECT t.id AS task_id, t.epoch, n.value AS note FROM job j
JOIN task t ON t.job_id = j.id AND t.step = $3 LEFT JOIN note n ON n.task_id = t.id
WHERE j.id = $1 AND j.tenant_id = $2 AND j.status = 'failed' AND t.status = 'failed'
  AND j.error ->> 'code' = ANY($4::text[]) AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp())
FOR UPDATE OF j
