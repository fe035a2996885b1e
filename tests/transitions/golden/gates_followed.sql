-- gates_followed
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS asked(tenant_id, key)
JOIN gate g ON g.tenant_id = asked.tenant_id AND g.key = asked.key AND g.declared
ORDER BY g.tenant_id, g.key
FOR SHARE OF g
