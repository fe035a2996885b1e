-- gates_still_waiting
SELECT g.job_id, array_agg(g.tenant_id) AS tenants, array_agg(g.key) AS keys
FROM gate_job g JOIN job j ON j.id = g.job_id
WHERE g.job_id = ANY($1::uuid[]) AND g.ready_at <= clock_timestamp() AND j.held
  AND CASE WHEN j.finished_at IS NULL THEN true ELSE false END
GROUP BY g.job_id
