-- gates_followed
SELECT g.tenant_id, g.key, g.at_most, g.per_minute
FROM unnest($1::text[], $2::text[]) AS followed(tenant_id, key)
JOIN gate g ON g.tenant_id = followed.tenant_id AND g.key = followed.key AND g.declared
ORDER BY g.tenant_id COLLATE "C", g.key COLLATE "C"
FOR SHARE OF g
