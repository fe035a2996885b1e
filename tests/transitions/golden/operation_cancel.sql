-- operation_cancel
SELECT j.id, j.tenant_id, j.pipeline, j.status, j.params, j.priority, j.exclusive_key, j.dedupe_key, j.gated,
    j.notify, j.finished_at,
    r.job_id IS NOT NULL AS is_run, r.template, r.version, r.scope, r.scope_id,
    (SELECT t.queue FROM task t WHERE t.job_id = j.id ORDER BY t.position, t.step LIMIT 1) AS queue FROM job j LEFT JOIN run r ON r.job_id = j.id
WHERE j.id = ANY($1::uuid[]) AND CASE WHEN j.tenant_id = $3 AND j.finished_at IS NULL AND j.status <> 'cancel_requested' AND j.created_at <= $2::timestamptz THEN true ELSE false END
ORDER BY j.id FOR UPDATE OF j SKIP LOCKED
