-- gates_lock
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS limits(tenant_id, key)
JOIN gate g ON g.tenant_id = limits.tenant_id AND g.key = limits.key
ORDER BY g.tenant_id COLLATE "C", g.key COLLATE "C"
FOR NO KEY UPDATE OF g
