-- signal_schema
SELECT e.value -> 'schema' FROM journal e JOIN job j ON j.id = e.job_id
WHERE e.job_id = $1 AND j.tenant_id = $2 AND e.kind = 'signal' AND e.state = 'open' AND e.name = $3
ORDER BY e.branch, e.number LIMIT 1
