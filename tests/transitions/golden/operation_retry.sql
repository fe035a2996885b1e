-- operation_retry
SELECT j.id, j.tenant_id, j.pipeline, j.status, j.params, j.priority, j.exclusive_key, j.dedupe_key, j.gated,
    j.notify, j.finished_at,
    r.job_id IS NOT NULL AS is_run, r.template, r.version, r.scope, r.scope_id,
    (SELECT t.queue FROM task t WHERE t.job_id = j.id ORDER BY t.position, t.step LIMIT 1) AS queue FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.id = ANY($1::uuid[]) AND CASE WHEN j.tenant_id = $3 AND j.status = 'failed' AND j.finished_at <= $2::timestamptz AND (j.expires_at IS NULL OR j.expires_at > clock_timestamp()) THEN true ELSE false END
ORDER BY j.id FOR UPDATE OF j SKIP LOCKED
