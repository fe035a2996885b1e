-- signal_waits
SELECT DISTINCT ON (e.name) e.name, e.value -> 'schema' AS schema, e.due_at, e.branch, e.number, e.epoch
FROM journal e JOIN job j ON j.id = e.job_id
WHERE e.job_id = $1 AND j.tenant_id = $2 AND e.kind = 'signal' AND e.state = 'open'
ORDER BY e.name, e.branch, e.number LIMIT 20
