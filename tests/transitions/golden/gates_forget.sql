-- gates_forget
DELETE FROM gate_job g
USING unnest($1::text[], $2::text[]) AS limits(tenant_id, key), gate, job j
WHERE g.tenant_id = limits.tenant_id AND g.key = limits.key AND gate.tenant_id = g.tenant_id AND gate.key = g.key
  AND j.id = g.job_id AND j.finished_at IS NOT NULL
  AND (gate.per_minute IS NULL OR g.admitted_at IS NULL OR NOT (g.admitted_at > clock_timestamp() - interval '60 seconds' AND g.admitted_at < clock_timestamp() + interval '60 seconds'))
