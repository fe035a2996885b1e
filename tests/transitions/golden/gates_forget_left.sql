-- gates_forget_left
DELETE FROM gate_job g
USING unnest($1::uuid[]) AS ended(job_id), job j, gate
WHERE g.job_id = ended.job_id AND j.id = ended.job_id AND j.finished_at IS NOT NULL
  AND gate.tenant_id = g.tenant_id AND gate.key = g.key
  AND (gate.per_minute IS NULL OR g.admitted_at IS NULL OR NOT (g.admitted_at > clock_timestamp() - interval '60 seconds' AND g.admitted_at < clock_timestamp() + interval '60 seconds'))
