-- gates_owners
SELECT g.key, g.owner, count(*) AS n FROM gate_job g JOIN gate ON gate.tenant_id = g.tenant_id AND gate.key = g.key
WHERE g.tenant_id = $1 AND g.key = ANY($2::text[]) AND g.admitted_at IS NOT NULL
  AND (gate.per_minute IS NULL OR (SELECT j.finished_at FROM job j WHERE j.id = g.job_id) IS NULL)
GROUP BY g.key, g.owner
