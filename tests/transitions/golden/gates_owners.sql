-- gates_owners
SELECT g.key, g.owner, count(*) AS n FROM gate_job g
WHERE g.tenant_id = $1 AND g.key = ANY($2::text[]) AND g.admitted_at IS NOT NULL
GROUP BY g.key, g.owner
